"""The command `longspec generate`: answers to prompts as JSONL."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

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
    loading,
    with_token_options,
)


@with_token_options("that of the target")
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
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip_invalid",
            help="Leave out prompts that are too long or that the chat template rejects, and count them.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
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
    token_options: Mapping[str, Any] = {},
) -> None:
    """Answer prompts, and write one JSON line per prompt in the same order; a terminal shows the texts.

    Under torchrun, ranks share the prompts.
    Above temperature 0, the default method is tree, so that a seed repeats the answers on any number of ranks.
    """
    from longspec.cli.answers import PromptRun, answer_prompts
    from longspec.cli.output import check_folder, locked_output, write_summary
    from longspec.cli.pair import SamplingOptions, note_plain_format, open_pair
    from longspec.cli.prompts import Prompt, read_prompts
    from longspec.errors import UserError
    from longspec.inference.process_group import shared_target
    from longspec.ranks.replicas import joined_replicas
    from longspec.signals import StopSignals

    with StopSignals(at_once=True) as stop, ExitStack() as stack:
        stack.enter_context(shared_target(tp_size, device, stop))
        replicas = stack.enter_context(joined_replicas(tp_size))

        def read() -> tuple[list[Prompt], SamplingOptions]:
            check_folder(json_file, "--json")
            sampling = SamplingOptions(max_new_tokens, temperature, top_p, top_k, token_options=token_options)
            if output is None and replicas.size > 1:
                raise UserError("--output: give a file; several ranks do not write to stdout")
            asked = read_prompts(prompts or [])
            if output is not None:
                stack.enter_context(locked_output(output))
            return asked, sampling

        def load() -> PromptRun:
            # A seed gives the same answers after an interruption, and on any number of ranks.
            repeats = temperature > 0
            with loading(model):
                pair = open_pair(model, draft, method, dtype, replicas.device(device), chat_template_kwargs, repeats)
            has_template = pair.chat_format != "plain"
            if chat and not has_template:
                raise UserError(f"--chat: {pair.name} has no chat template; use --raw")
            if any(not isinstance(prompt.content, str) for prompt in asked):
                note_plain_format(pair)
            uses_template = has_template if chat is None else chat
            return PromptRun(pair, asked, sampling, batch_size, seed, uses_template, skip_invalid)

        # Only rank 0 reads stdin. It locks the output before the weights are loaded.
        asked, sampling = replicas.from_rank_zero(read)
        run = replicas.together(load)
        if run.problems and replicas.rank == 0:
            print(run.note, file=sys.stderr)
        answer_prompts(run, output, overwrite, stop, replicas, lambda summary: write_summary(summary, json_file))
