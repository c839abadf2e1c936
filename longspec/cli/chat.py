"""The command `longspec chat`. `longspec.cli.session` runs the conversation."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from longspec.cli.options import (
    EMBEDDED_PAIR,
    LARGEST_SEED,
    MODEL_HELP,
    PROMPTS,
    SAMPLING,
    DeviceOption,
    DraftOption,
    DtypeOption,
    MaxNewTokensOption,
    MethodOption,
    ModelOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
    loading,
)


def chat(
    pair: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=EMBEDDED_PAIR)] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    chat_template_kwargs: TemplateOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    max_new_tokens: MaxNewTokensOption = 512,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            min=0,
            max=LARGEST_SEED,
            help="Seed of the answers.",
            show_default="random",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", help="System prompt.", show_default="that of the template", rich_help_panel=PROMPTS),
    ] = None,
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer, /quit or Ctrl-D ends the chat, /help lists the commands."""
    with loading(pair or model):
        from longspec.cli.pair import SamplingOptions, choose_model, note_plain_format, open_pair
        from longspec.cli.session import Session

        name = choose_model(pair, model)
        sampling = SamplingOptions(max_new_tokens, temperature, top_p, top_k)
        loaded = open_pair(name, draft, method, dtype, device, chat_template_kwargs)
        note_plain_format(loaded)
    Session(loaded, sampling, Console(highlight=False), system, seed).run()
