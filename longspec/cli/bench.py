"""The command `longspec bench`. `longspec.cli.comparison` runs the comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from longspec.cli.options import (
    MODEL_HELP,
    OUTPUT,
    PROMPTS,
    SAMPLING,
    DeviceOption,
    DraftOption,
    DtypeOption,
    ModelOption,
    TemperatureOption,
    TemplateOption,
    loading,
    with_token_options,
)
from longspec.models.packaged_targets import SMOLLM2

DEFAULT_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step how to compute the area of a triangle with sides 5, 12 and 13.",
    "Write a Python function that returns the n-th Fibonacci number, then explain each line of it.",
    "Repeat the following text and correct its spelling: The libary opens at nine oclock in the morning and closes at "
    "six in the evning. Books may be borowed for four weeks. The libary is closed on sundays and on public holidays.",
)
"""A story, a calculation, code, and text that repeats its prompt."""


@with_token_options("none")
def bench(
    pair: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=SMOLLM2)] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="File with prompts, .txt or .jsonl.",
            show_default="four built-in prompts",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    chat_template_kwargs: TemplateOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max_new_tokens", min=2, help="Length of each answer.", rich_help_panel=SAMPLING)
    ] = 128,
    temperature: TemperatureOption = 0.0,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png", help="Picture to write.", show_default="bench.png with matplotlib", rich_help_panel=OUTPUT
        ),
    ] = None,
    measure_again: Annotated[
        bool, typer.Option("--measure_again", help="Forget the measured times of rounds, from which auto chooses.")
    ] = False,
    token_options: Mapping[str, Any] = {},
) -> None:
    """Compare vanilla, lookup, tree and auto: a table, a picture, and a JSON line on stdout.

    Prompts run one at a time, and answers end at the token limit, not at an EOS. Methods that need a trained draft
    are skipped on a pair without one.
    """
    from longspec.cli.comparison import compare, result_table
    from longspec.cli.output import check_folder
    from longspec.cli.pair import SamplingOptions, choose_model, open_pair
    from longspec.cli.prompts import read_prompts
    from longspec.errors import UserError
    from longspec.inference.adaptive.time_cache import forget_times

    # The default picture is left out without matplotlib.
    has_matplotlib = find_spec("matplotlib") is not None
    if png is not None and not has_matplotlib:
        raise UserError("--png: matplotlib is not installed; run: pip install matplotlib")
    picture = png or (Path("bench.png") if has_matplotlib else None)
    check_folder(picture, "--png")
    name = choose_model(pair, model)
    sampling = SamplingOptions(max_new_tokens, temperature, token_options=token_options)
    if prompts is not None and not Path(prompts).is_file():
        raise UserError(f"--prompts {prompts}: no such file")
    asked = read_prompts([prompts] if prompts is not None else DEFAULT_PROMPTS)
    # vanilla, because a pair without a draft can be compared, too; `compare` gives each method by name.
    with loading(name):
        loaded = open_pair(name, draft, "vanilla", dtype, device, chat_template_kwargs, applied=())
    if measure_again:
        forget_times()
    console = Console(stderr=True, highlight=False)
    with console.status("measuring") as status:
        summary = compare(loaded, asked, sampling, lambda label: status.update(f"measuring {label}"))
    console.print(result_table(summary))
    for method, reason in summary["skipped"].items():
        console.print(f"{method}: skipped, {reason}", markup=False)
    if picture is not None:
        from longspec.cli.picture import draw

        draw(summary, picture)
        console.print(f"picture: {picture}", markup=False)
    print(json.dumps(summary))
