"""Options that several commands share, with their help texts, limits and groups. Does not import torch."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape

from longspec.errors import UserError
from longspec.inference.methods import AUTO, DEFAULT_GAMMA, Drafting, parse_shape
from longspec.inference.token_options import COMMAND_OPTIONS, given_options
from longspec.models.packaged_targets import SMOLLM2

Method = Literal["vanilla", "seq", "tree", "magicdec", "lookup", "auto"]
TreeRule = Literal["reject", "descend"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
LARGEST_SEED = 2**63 - 1
"""`longspec.generate` takes larger seeds, but the number of a turn is added to a seed."""

# Groups of options in the help.
PAIR = "Pair"
SAMPLING = "Sampling"
PROMPTS = "Prompts"
DRAFTING = "Drafting"
OUTPUT = "Output"
OF_TARGET: dict[str, Any] = {"min": 0.0, "max": 1.0, "show_default": "that of the target"}
MODEL_HELP = "Pair by name, hub id, folder or .gguf file."

PairArgument = Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=SMOLLM2)]


def option(default: Any, help: str, panel: str | None = None, flag: str | None = None, **settings: Any) -> Any:
    """A field of a group of options. flag: None for its name. settings: those of `typer.Option`."""
    return field(default=default, metadata={"flag": flag, "help": help, "rich_help_panel": panel, **settings})


@dataclass(frozen=True)
class PairOptions:
    """What a command loads."""

    model: str | None = option(None, MODEL_HELP, PAIR, show_default=SMOLLM2)
    draft: str | None = option(
        None, "Draft of the target: .pth file, folder or hub id.", PAIR, show_default="that of the pair"
    )
    device: str | None = option(None, "cpu, cuda or cuda:N.", PAIR, show_default="cuda if present")
    dtype: Dtype = option("auto", "auto: that of the weights; float32 on a CPU.", PAIR)
    deterministic: bool = option(
        False, "Greedy answers that no method, batch or timing changes, in half precision, too; slower.", PAIR
    )
    chat_template_kwargs: str | None = option(
        None, 'Variables of the chat template, as JSON: {"enable_thinking": false}.', PROMPTS, show_default="none"
    )

    def named(self, pair: str | None) -> "PairOptions":
        """The options, with the pair of the positional argument. Raises UserError if --model names one, too."""
        if pair is not None and self.model is not None:
            raise UserError(f"{pair}, --model {self.model}: give the pair once")
        return replace(self, model=self.model if pair is None else pair)


@dataclass(frozen=True)
class MethodOptions:
    method: Method | None = option(None, "How tokens are proposed.", PAIR, show_default="auto")
    tp_size: int = option(1, "Number of ranks that share the target, started by torchrun.", PAIR, min=1)


@dataclass(frozen=True)
class ShapeOptions:
    temperature: float = option(0.0, "0 is greedy.", SAMPLING, min=0.0)
    top_p: float = option(1.0, "Nucleus mass; 1 keeps all tokens.", SAMPLING, min=0.0, max=1.0)
    top_k: int = option(0, "0 keeps all tokens.", SAMPLING, min=0)
    min_p: float | None = option(
        None, "Leave out tokens below this share of the highest probability.", SAMPLING, **OF_TARGET
    )
    typical_p: float | None = option(None, "Mass of typical tokens; 1 keeps all tokens.", SAMPLING, **OF_TARGET)
    epsilon_cutoff: float | None = option(None, "Leave out tokens of lower probability.", SAMPLING, **OF_TARGET)


@dataclass(frozen=True)
class DraftingOptions:
    tree_shape: str | None = option(None, "Nodes per level, as in 4,16,16.", DRAFTING, show_default="4,16,16,16,16")
    tree_rule: TreeRule = option("reject", "How a tree is accepted above temperature 0.", DRAFTING)
    tree_nodes: int | None = option(None, "Verify this many nodes.", DRAFTING, show_default="all")
    lookup_branches: bool = option(False, "Add continuations that the context already holds.", DRAFTING)
    gamma: int = option(DEFAULT_GAMMA, "Length of the chain (seq, magicdec, lookup).", DRAFTING, min=1)

    def arguments(self, method: str | None, prompts: Sequence[str] = ()) -> dict[str, Any]:
        """As arguments of `longspec.generate` and of the scheduler. Raises UserError for values that no target takes,
        and for a shape of one level next to a prompt that is a number: `--tree_shape 2 2` means two levels."""
        from longspec.inference.arguments import check_drafting  # imports torch

        options = {name: value for name, value in vars(self).items() if name != "tree_shape"}
        if self.tree_shape is not None:
            if self.tree_shape.isdecimal() and (numbers := [prompt for prompt in prompts if prompt.isdecimal()]):
                advice = "write levels as in 4,16,16, or give the prompt on stdin"
                raise UserError(f"--tree_shape {self.tree_shape}, prompt {numbers[0]}: {advice}")
            options["tree_shape"] = parse_shape(self.tree_shape)
        check_drafting(Drafting(method or AUTO, **options))
        return options


def command(unset: str = "that of the target") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands, of which each parameter that is a group of options becomes an option per field.

    A parameter `token_options` takes those of COMMAND_OPTIONS that are given; the help calls the others `unset`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        groups: dict[str, Any] = {name: group for name, group in own.items() if is_dataclass(group)}
        has_token_options = "token_options" in own

        @wraps(function)
        def run(**arguments: Any) -> None:
            for value in arguments.values():
                if isinstance(value, Path) and str(value).startswith("--"):
                    raise UserError(f"{value}: an option where a path is expected; the option before it has no value")
            for name, group in groups.items():
                arguments[name] = group(**{part.name: arguments.pop(part.name, part.default) for part in fields(group)})
            if has_token_options:
                given = {name: arguments.pop(name, None) for name in COMMAND_OPTIONS}
                arguments["token_options"] = given_options(given)
            function(**arguments)

        parameters = [own for name, own in signature.parameters.items() if name not in {*groups, "token_options"}]
        for group in groups.values():
            types = get_type_hints(group)
            parameters += [_parameter(part.name, types[part.name], part) for part in fields(group)]
        for name, (kind, text) in COMMAND_OPTIONS.items() if has_token_options else ():
            part = option(None, text, SAMPLING, show_default=unset)
            parameters.append(_parameter(name, kind | None, part))  # type: ignore[operator]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(name: str, kind: Any, part: Any) -> inspect.Parameter:
    """part: a field that `option` made."""
    settings = dict(part.metadata)
    annotation = Annotated[kind, typer.Option(settings.pop("flag") or f"--{name}", **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=part.default, annotation=annotation)


@contextmanager
def loading(pair: str | None) -> Iterator[None]:
    """Context that shows on a terminal that a pair is loaded, which takes seconds from the first import on."""
    with Console(stderr=True, highlight=False).status(f"loading {escape(pair or SMOLLM2)}"):
        yield
