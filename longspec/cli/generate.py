"""The command `longspec generate`: answers to prompts as JSONL."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from longspec.cli.options import (
    LARGEST_SEED,
    OUTPUT,
    PROMPTS,
    SAMPLING,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    MaxNewTokensOption,
    MethodOption,
    ModelOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
    TpSizeOption,
)


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts, .txt files (a prompt per line), .jsonl files (`prompt` or `messages`), or - for stdin.",
            show_default="stdin",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Apply the chat template to plain prompts, or not.",
            show_default="--chat for a target with a template",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    tp_size: TpSizeOption = 1,
    chat_template_kwargs: TemplateOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    max_new_tokens: MaxNewTokensOption = 256,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of the answers.", rich_help_panel=SAMPLING)
    ] = 0,
    batch_size: Annotated[
        int, typer.Option("--batch_size", min=1, help="Number of prompts to answer together.", rich_help_panel=OUTPUT)
    ] = 8,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="JSONL file; an interrupted run continues in it.",
            show_default="stdout",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output file.", rich_help_panel=OUTPUT)
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Answer prompts, and write one JSON line per prompt in the same order."""
    from longspec.cli.batches import Job, answer_prompts
    from longspec.cli.pair import Sampling, note_plain_format, open_pair
    from longspec.cli.prompts import read_prompts
    from longspec.cli.results import check_folder, open_results, write_summary
    from longspec.errors import UserError
    from longspec.inference.process_group import shared_target
    from longspec.signals import StopSignals, exit_code

    check_folder(json_file, "--json")
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k)
    with StopSignals(at_once=True) as stop, ExitStack() as context:
        context.enter_context(shared_target(tp_size, device, stop))
        asked = read_prompts(prompts or [])
        results = context.enter_context(open_results(output, asked))
        pair = open_pair(model, draft, method, dtype, device, chat_template_kwargs)
        has_template = pair.chat_format != "plain"
        if chat and not has_template:
            raise UserError(f"--chat: {pair.name} has no chat template; use --raw")
        if any(not isinstance(prompt.content, str) for prompt in asked):
            note_plain_format(pair)
        uses_template = has_template if chat is None else chat
        job = Job(pair, asked, sampling, batch_size, seed, uses_template)
        results.resume(job.run, overwrite)
        stop.at_once = False
        summary = answer_prompts(job, results, stop)
        write_summary(summary, json_file)
        if stop.received is not None:
            name = signal.Signals(stop.received).name
            again = "" if output is None else "; the same command continues"
            print(f"stopped by {name} after {results.done} of {len(asked)} prompts{again}", file=sys.stderr)
            raise SystemExit(exit_code(stop.received))
