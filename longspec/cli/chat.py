"""The command `longspec chat`. `longspec.cli.session` runs the conversation."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from longspec.cli.options import (
    LARGEST_SEED,
    PROMPTS,
    SAMPLING,
    DraftingOptions,
    MethodOptions,
    PairArgument,
    PairOptions,
    ShapeOptions,
    command,
    loading,
    option,
)


@dataclass(frozen=True)
class ChatOptions:
    max_new_tokens: int = option(512, "Largest number of tokens per answer.", SAMPLING, min=1)
    seed: int | None = option(None, "Seed of the answers.", SAMPLING, min=0, max=LARGEST_SEED, show_default="random")
    system: str | None = option(None, "System prompt.", PROMPTS, show_default="that of the template")


@command()
def chat(
    source: PairOptions,
    method: MethodOptions,
    shape: ShapeOptions,
    drafting: DraftingOptions,
    options: ChatOptions,
    token_options: Mapping[str, Any],
    pair: PairArgument = None,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer, /quit or Ctrl-D ends the chat, /help lists the commands."""
    source = source.named(pair)
    with ExitStack() as stack:
        with loading(source.model):
            from longspec.cli.pair import SamplingOptions, open_pair
            from longspec.cli.prompts import decoded
            from longspec.cli.session import Session
            from longspec.inference.process_group import only_rank_zero

            sampling = SamplingOptions(
                **vars(shape), max_new_tokens=options.max_new_tokens, token_options=token_options
            )
            arguments = drafting.arguments(method.method)
            system = None if options.system is None else decoded(os.fsencode(options.system), "--system")
            stack.enter_context(only_rank_zero(method.tp_size, source.device))
            loaded = open_pair(source, method.method)
            loaded.drafting = arguments
        Session(loaded, sampling, Console(highlight=False), system, options.seed).run()
