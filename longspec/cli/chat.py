"""The command `longspec chat`. `longspec.cli.session` runs the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Console

from longspec.cli.options import (
    LARGEST_SEED,
    MODEL_HELP,
    PROMPTS,
    SAMPLING,
    DeviceOption,
    DraftOption,
    DtypeOption,
    EpsilonOption,
    GammaOption,
    LookupBranchesOption,
    MaxNewTokensOption,
    MethodOption,
    MinPOption,
    ModelOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
    TpSizeOption,
    TreeNodesOption,
    TreeRuleOption,
    TreeShapeOption,
    TypicalPOption,
    drafting_options,
    loading,
    with_token_options,
)
from longspec.models.packaged_targets import SMOLLM2


@with_token_options("that of the target")
def chat(
    pair: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=SMOLLM2)] = None,
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
    min_p: MinPOption = None,
    typical_p: TypicalPOption = None,
    epsilon_cutoff: EpsilonOption = None,
    tree_shape: TreeShapeOption = None,
    tree_rule: TreeRuleOption = "reject",
    tree_nodes: TreeNodesOption = None,
    lookup_branches: LookupBranchesOption = False,
    gamma: GammaOption = 4,
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
    token_options: Mapping[str, Any] = {},
) -> None:
    """Chat in the terminal. Ctrl-C stops an answer, /quit or Ctrl-D ends the chat, /help lists the commands."""
    with ExitStack() as stack:
        with loading(pair or model):
            from longspec.cli.pair import SamplingOptions, choose_model, note_plain_format, open_pair
            from longspec.cli.session import Session
            from longspec.inference.process_group import only_rank_zero

            name = choose_model(pair, model)
            sampling = SamplingOptions(
                max_new_tokens, temperature, top_p, top_k, min_p, typical_p, epsilon_cutoff, token_options
            )
            drafting = drafting_options(tree_shape, tree_rule, tree_nodes, lookup_branches, gamma)
            stack.enter_context(only_rank_zero(tp_size, device))
            loaded = open_pair(name, draft, method, dtype, device, chat_template_kwargs)
            loaded.drafting = drafting
            note_plain_format(loaded)
        Session(loaded, sampling, Console(highlight=False), system, seed).run()
