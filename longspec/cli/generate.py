"""The command `longspec generate`: answers to prompts as JSONL."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from longspec.cli.options import (
    LARGEST_SEED,
    OUTPUT,
    PROMPTS,
    SAMPLING,
    DraftingOptions,
    MethodOptions,
    PairOptions,
    ShapeOptions,
    command,
    loading,
    option,
)
from longspec.errors import UserError, os_errors
from longspec.locks import locked_file


@dataclass(frozen=True)
class GenerateOptions:
    chat: bool = option(True, "Apply the chat template, if there is one, to plain prompts.", PROMPTS, "--chat/--raw")
    skip_invalid: bool = option(
        False, "Leave out prompts that are too long or that the chat template rejects, and count them.", PROMPTS
    )
    max_new_tokens: int = option(256, "Largest number of tokens per answer.", SAMPLING, min=1)
    seed: int = option(0, "Seed of the answers.", SAMPLING, min=0, max=LARGEST_SEED)
    batch_size: int = option(8, "Number of prompts to answer together.", OUTPUT, min=1)
    output: Path | None = option(None, "JSONL file; an interrupted run continues in it.", OUTPUT, show_default="stdout")
    overwrite: bool = option(False, "Replace the output file.", OUTPUT)
    json_file: Path | None = option(None, "Write a JSON summary to this file; - is stderr.", OUTPUT, "--json")


@command()
def generate(
    source: PairOptions,
    method: MethodOptions,
    shape: ShapeOptions,
    drafting: DraftingOptions,
    options: GenerateOptions,
    token_options: Mapping[str, Any],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts, .txt files (a prompt per line), .jsonl files (`prompt` or `messages`), or - for stdin.",
            show_default="stdin",
        ),
    ] = None,
) -> None:
    """Answer prompts, and write one JSON line per prompt in the same order; a terminal shows the texts.

    Under torchrun, ranks share the prompts.
    Above temperature 0, the default method is tree (vanilla on a CPU), so that a seed repeats the answers on any number
    of ranks.
    """
    from longspec.cli.answers import PromptRun, answer_prompts, run_record
    from longspec.cli.output import check_folder
    from longspec.cli.pair import SamplingOptions, open_pair
    from longspec.cli.prompts import Prompt, read_prompts
    from longspec.inference.process_group import shared_target
    from longspec.ranks.replicas import joined_replicas
    from longspec.signals import StopSignals

    with StopSignals(at_once=True, note="") as stop, ExitStack() as stack:
        stack.enter_context(shared_target(method.tp_size, source.device, stop))
        replicas = stack.enter_context(joined_replicas(method.tp_size))
        output, arguments = options.output, drafting.arguments(method.method, prompts or [])

        def read() -> tuple[list[Prompt], SamplingOptions]:
            check_folder(options.json_file, "--json", [*(prompts or []), output, output and run_record(output)])
            sampling = SamplingOptions(
                **vars(shape), max_new_tokens=options.max_new_tokens, token_options=token_options
            )
            if output is None and replicas.size > 1:
                raise UserError("--output: give a file; several ranks do not write to stdout")
            if output is None and sys.stdout is None:
                raise UserError("--output: give a file; stdout is closed")
            asked = read_prompts(prompts or [])
            if output is not None:
                if any(os.path.realpath(prompt) == os.path.realpath(output) for prompt in prompts or []):
                    raise UserError(f"--output {output}: is a file of prompts; give another")
                # What is not a file cannot be continued, and reading it may never end.
                if str(output) == "-" or (os.path.exists(output) and not os.path.isfile(output)):
                    raise UserError(f"--output {output}: not a file; leave the option out to write to stdout")
                with os_errors(f"--output {output}: its folder cannot be created"):
                    output.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked_file(output))
            return asked, sampling

        # Only rank 0 reads stdin. It locks the output before the weights are loaded.
        asked, sampling = replicas.from_rank_zero(read)

        def load() -> PromptRun:
            own = replace(source, device=replicas.device(source.device))
            with loading(source.model):
                # A seed gives the same answers after an interruption, and on any number of ranks.
                pair = open_pair(own, method.method, repeats=sampling.temperature > 0)
            pair.drafting = arguments
            return PromptRun(
                pair, asked, sampling, options.batch_size, options.seed, options.chat, options.skip_invalid
            )

        run = replicas.together(load)
        if run.problems and replicas.rank == 0:
            print(run.note, file=sys.stderr)
        answer_prompts(run, output, options.overwrite, options.json_file, stop, replicas)
