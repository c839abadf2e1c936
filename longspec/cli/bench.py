"""The command `longspec bench`. `longspec.cli.comparison` runs the comparison."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from longspec.cli.options import OUTPUT, PROMPTS, SAMPLING, PairArgument, PairOptions, command, loading, option

DEFAULT_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain step by step how to compute the area of a triangle with sides 5, 12 and 13.",
    "Write a Python function that returns the n-th Fibonacci number, then explain each line of it.",
    "Repeat the following text and correct its spelling: The libary opens at nine oclock in the morning and closes at "
    "six in the evning. Books may be borowed for four weeks. The libary is closed on sundays and on public holidays.",
)
"""A story, a calculation, code, and text that repeats its prompt."""


@dataclass(frozen=True)
class BenchOptions:
    prompts: str | None = option(
        None, "File with prompts, .txt or .jsonl.", PROMPTS, show_default="four built-in prompts"
    )
    max_new_tokens: int = option(128, "Length of each answer.", SAMPLING, min=2)
    temperature: float = option(0.0, "0 is greedy.", SAMPLING, min=0.0)
    png: Path | None = option(None, "PNG to write.", OUTPUT, show_default="bench.png with matplotlib")
    measure_again: bool = option(False, "Forget the measured times of rounds, from which auto chooses.")


@command("none")
def bench(
    source: PairOptions, options: BenchOptions, token_options: Mapping[str, Any], pair: PairArgument = None
) -> None:
    """Compare vanilla, lookup, tree and auto: a table, a picture, and a JSON line on stdout.

    Prompts run one at a time, and answers end at the token limit, not at an EOS. Methods that need a trained draft
    are skipped on a pair without one.
    """
    from longspec.cli.comparison import compare, result_table
    from longspec.cli.output import check_folder
    from longspec.cli.pair import SamplingOptions, open_pair
    from longspec.cli.prompts import read_prompts
    from longspec.errors import UserError
    from longspec.extras import is_installed
    from longspec.inference.adaptive.time_cache import forget_times

    # The default picture is left out without matplotlib.
    has_matplotlib = is_installed("matplotlib")
    if options.png is not None and not has_matplotlib:
        raise UserError("--png: matplotlib is not installed; run: pip install matplotlib")
    picture = options.png or (Path("bench.png") if has_matplotlib else None)
    check_folder(picture, "--png", [options.prompts])
    if picture is not None and picture.suffix.lower() not in ("", ".png"):
        raise UserError(f"--png {picture}: the picture is a PNG; give a name that ends in .png")
    source = source.named(pair)
    sampling = SamplingOptions(options.temperature, max_new_tokens=options.max_new_tokens, token_options=token_options)
    if options.prompts is not None and not Path(options.prompts).is_file():
        raise UserError(f"--prompts {options.prompts}: not a file")
    asked = read_prompts(DEFAULT_PROMPTS if options.prompts is None else [options.prompts])
    # vanilla, because a pair without a draft can be compared, too; `compare` gives each method by name.
    with loading(source.model):
        loaded = open_pair(source, "vanilla", applied=())
    if options.measure_again:
        forget_times()
    console = Console(stderr=True, highlight=False)
    with console.status("measuring") as status:
        summary = compare(loaded, asked, sampling, lambda method: status.update(f"measuring {method}"))
    console.print(result_table(summary))
    for method, reason in summary["skipped"].items():
        console.print(f"{method}: skipped, {reason}", markup=False)
    print(json.dumps(summary), flush=True)
    if picture is not None:
        from longspec.cli.picture import draw

        try:
            draw(summary, picture)
            console.print(f"picture: {picture}", markup=False)
        except UserError as error:
            if options.png is not None:
                raise
            console.print(f"no picture: {error}", markup=False)  # nobody asked for it
