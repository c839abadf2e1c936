"""The argument parser of the commands evaluate, regenerate and draft, and the options that the first two share."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from longspec.errors import UserError
from longspec.inference.methods import AUTO, DEFAULT_GAMMA, DEFAULT_SHAPE, METHODS, TREE_RULES, Drafting, parse_shape
from longspec.inference.token_options import COMMAND_OPTIONS

DRAFTING = ("method", "tree_shape", "gamma", "tree_rule", "tree_nodes", "lookup_branches")
"""The options that are fields of `Drafting`."""
DTYPES = ("auto", "float32", "float16", "bfloat16")


class _Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of an option with a value, unless the text names it or there is none. Keeps line
    breaks of the examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = action.default in (None, ()) or action.nargs == 0 or "default:" in (action.help or "")
        return action.help if is_told else super()._get_help_string(action)


class _Shape(argparse.Action):
    """Takes the list of numbers that `parse_shape` reads."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, list(parse_shape(" ".join(values))))


class Parser(argparse.ArgumentParser):
    """A parser that reports its errors as UserError. Its help shows defaults and examples."""

    def __init__(self, examples: Sequence[str], **settings: Any) -> None:
        epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples)
        super().__init__(epilog=epilog, formatter_class=_Format, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_device_options(add: Callable[..., Any]) -> None:
    add("--dtype", choices=DTYPES, default="auto", help="auto: that of the target's weights; float32 on a CPU")
    add("--device", help="default: cuda if there is one; under torchrun that of the rank")
    add("--tp_size", type=int, default=1, help="number of ranks that share the target, started by torchrun")


def add_sampling_options(add: Callable[..., Any]) -> None:
    """Add top_p, top_k, and FILTER_OPTIONS and COMMAND_OPTIONS, which are None unless they are given."""
    add("--top_p", type=float, default=1.0, help="nucleus mass; 1 keeps all tokens")
    add("--top_k", type=int, default=0, help="0 keeps all tokens")
    add("--min_p", type=float, help="leave out tokens of less than this share of the highest probability")
    add("--typical_p", type=float, help="mass of the tokens of typical probability; 1 keeps all tokens")
    add("--epsilon_cutoff", type=float, help="leave out tokens of lower probability")
    for name, (kind, text) in COMMAND_OPTIONS.items():
        add(f"--{name}", type=kind, help=text[0].lower() + text[1:].rstrip("."))


def add_drafting_options(add: Callable[..., Any], method: str) -> None:
    """Add DRAFTING. method: the default one."""
    add("--method", choices=(*METHODS, AUTO), default=method, help="how tokens are proposed")
    shape = list(DEFAULT_SHAPE)
    nodes = "tree: number of nodes in each level, as in 4 16 16 or 4,16,16"
    add("--tree_shape", action=_Shape, nargs="*", default=shape, help=nodes)
    rule = "how a tree is drafted and accepted above temperature 0"
    add("--tree_rule", choices=TREE_RULES, default=TREE_RULES[0], help=rule)
    add("--tree_nodes", type=int, help="tree: verify this many nodes, the most probable ones; default: the whole tree")
    add("--lookup_branches", action="store_true", help="tree: add continuations that the context already holds")
    add("--gamma", type=int, default=DEFAULT_GAMMA, help="length of the chain (seq, magicdec, lookup)")


def drafting_of(options: Any) -> Drafting:
    """The drafting settings among the options."""
    return Drafting(**{name: getattr(options, name) for name in DRAFTING})
