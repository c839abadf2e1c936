"""Options that several commands share, with their help texts, limits and groups. Does not import torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from longspec.errors import UserError
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
MODEL_HELP = "Pair by name, hub id, folder or .gguf file."

ModelOption = Annotated[
    str | None, typer.Option("--model", help=MODEL_HELP, show_default=SMOLLM2, rich_help_panel=PAIR)
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Draft of the target: .pth file, folder or hub id.",
        show_default="that of the pair",
        rich_help_panel=PAIR,
    ),
]
MethodOption = Annotated[
    Method | None,
    typer.Option(
        "--method",
        help="How tokens are proposed.",
        show_default="auto",
        rich_help_panel=PAIR,
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat_template_kwargs",
        help='Variables of the chat template, as JSON: {"enable_thinking": false}.',
        show_default="none",
        rich_help_panel=PROMPTS,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:N.", show_default="cuda if present", rich_help_panel=PAIR),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option("--dtype", help="auto: that of the weights; float32 on a CPU.", rich_help_panel=PAIR),
]
TpSizeOption = Annotated[
    int,
    typer.Option(
        "--tp_size", min=1, help="Number of ranks that share the target, started by torchrun.", rich_help_panel=PAIR
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 is greedy.", rich_help_panel=SAMPLING)
]
TopPOption = Annotated[
    float, typer.Option("--top_p", min=0.0, max=1.0, help="Nucleus mass; 1 keeps all tokens.", rich_help_panel=SAMPLING)
]
TopKOption = Annotated[int, typer.Option("--top_k", min=0, help="0 keeps all tokens.", rich_help_panel=SAMPLING)]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max_new_tokens", min=1, help="Largest number of tokens per answer.", rich_help_panel=SAMPLING)
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        "--min_p",
        min=0.0,
        max=1.0,
        help="Leave out tokens below this share of the highest probability.",
        show_default="that of the target",
        rich_help_panel=SAMPLING,
    ),
]
TypicalPOption = Annotated[
    float | None,
    typer.Option(
        "--typical_p",
        min=0.0,
        max=1.0,
        help="Mass of typical tokens; 1 keeps all tokens.",
        show_default="that of the target",
        rich_help_panel=SAMPLING,
    ),
]
EpsilonOption = Annotated[
    float | None,
    typer.Option(
        "--epsilon_cutoff",
        min=0.0,
        max=1.0,
        help="Leave out tokens of lower probability.",
        show_default="that of the target",
        rich_help_panel=SAMPLING,
    ),
]
TreeShapeOption = Annotated[
    str | None,
    typer.Option(
        "--tree_shape", help="Nodes per level, as in 4,16,16.", show_default="4,16,16,16,16", rich_help_panel=DRAFTING
    ),
]
TreeRuleOption = Annotated[
    TreeRule,
    typer.Option("--tree_rule", help="How a tree is accepted above temperature 0.", rich_help_panel=DRAFTING),
]
TreeNodesOption = Annotated[
    int | None,
    typer.Option("--tree_nodes", help="Verify this many nodes.", show_default="all", rich_help_panel=DRAFTING),
]
LookupBranchesOption = Annotated[
    bool,
    typer.Option(
        "--lookup_branches", help="Add continuations that the context already holds.", rich_help_panel=DRAFTING
    ),
]
GammaOption = Annotated[
    int,
    typer.Option("--gamma", min=1, help="Length of the chain (seq, magicdec, lookup).", rich_help_panel=DRAFTING),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write a JSON summary to this file; - is stderr.", rich_help_panel=OUTPUT),
]


def with_token_options(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of commands: their argument `token_options` has those of COMMAND_OPTIONS that are given.

    default: how the help names the value of an option that is not given.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**arguments: Any) -> None:
            own = {name: arguments.pop(name) for name in COMMAND_OPTIONS}
            command(**arguments, token_options=given_options(own))

        signature = inspect.signature(command, eval_str=True)
        others = [parameter for name, parameter in signature.parameters.items() if name != "token_options"]
        for name, (kind, text) in COMMAND_OPTIONS.items():
            option = typer.Option(f"--{name}", help=text, show_default=default, rich_help_panel=SAMPLING)
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
            others.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def drafting_options(
    tree_shape: str | None, tree_rule: str, tree_nodes: int | None, lookup_branches: bool, gamma: int
) -> dict[str, Any]:
    """These options as arguments of `longspec.generate` and of the scheduler. Raises UserError for a wrong shape."""
    options: dict[str, Any] = {"tree_rule": tree_rule, "tree_nodes": tree_nodes, "gamma": gamma}
    options["lookup_branches"] = lookup_branches
    if tree_shape is not None:
        widths = tree_shape.replace(",", " ").split()
        if not widths or not all(width.isdecimal() for width in widths):
            raise UserError(f"--tree_shape: {tree_shape!r}; give the nodes of each level, as in 4,16,16")
        options["tree_shape"] = tuple(map(int, widths))
    return options


@contextmanager
def loading(pair: str | None) -> Iterator[None]:
    """Context that shows on a terminal that a pair is loaded, which takes seconds from the first import on."""
    with Console(stderr=True, highlight=False).status(f"loading {escape(pair or SMOLLM2)}"):
        yield


def examples(*lines: str) -> str:
    """A help epilog with one command per line."""
    return "Examples:\n\n" + "\n\n".join(f"`{line}`" for line in lines)
