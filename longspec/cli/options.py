"""Options that several commands share, with their help texts, limits and groups. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

EMBEDDED_PAIR = "smollm2-135m"
Method = Literal["vanilla", "seq", "tree", "magicdec", "lookup", "auto"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
LARGEST_SEED = 2**63 - 1
"""torch takes larger seeds, but the number of a turn or batch is added to a seed."""

# Groups of options in the help.
PAIR = "Pair"
SAMPLING = "Sampling"
PROMPTS = "Prompts"
OUTPUT = "Output"
MODEL_HELP = "Pair by name, hub id, folder or .gguf file."

ModelOption = Annotated[
    str | None, typer.Option("--model", help=MODEL_HELP, show_default=EMBEDDED_PAIR, rich_help_panel=PAIR)
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
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write a JSON summary to this file; - is stderr.", rich_help_panel=OUTPUT),
]


@contextmanager
def loading(pair: str | None) -> Iterator[None]:
    """Context that shows on a terminal that a pair is loaded, which takes seconds from the first import on."""
    with Console(stderr=True, highlight=False).status(f"loading {escape(pair or EMBEDDED_PAIR)}"):
        yield


def examples(*lines: str) -> str:
    """A help epilog with one command per line."""
    return "Examples:\n\n" + "\n\n".join(f"`{line}`" for line in lines)
