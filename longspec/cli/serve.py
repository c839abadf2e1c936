"""`longspec serve`: the options of the HTTP server; `longspec.inference.server` holds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from longspec.cli.options import (
    MODEL_HELP,
    DeviceOption,
    DraftOption,
    DtypeOption,
    GammaOption,
    LookupBranchesOption,
    MethodOption,
    ModelOption,
    TemplateOption,
    TpSizeOption,
    TreeNodesOption,
    TreeRuleOption,
    TreeShapeOption,
    drafting_options,
)
from longspec.models.packaged_targets import SMOLLM2

if TYPE_CHECKING:
    from longspec.cli.pair import LoadedPair
    from longspec.data.aligners import Turn

NETWORK, LIMITS = "Network", "Limits"
ROWS, ROWS_ON_CPU = 16, 4
"""Default number of rows. Each reserves memory for the whole context, and a CPU gains little from more."""


def serve(
    pair: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=SMOLLM2)] = None,
    model: ModelOption = None,
    draft: DraftOption = None,
    method: MethodOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    tp_size: TpSizeOption = 1,
    chat_template_kwargs: TemplateOption = None,
    tree_shape: TreeShapeOption = None,
    tree_rule: TreeRuleOption = "reject",
    tree_nodes: TreeNodesOption = None,
    lookup_branches: LookupBranchesOption = False,
    gamma: GammaOption = 4,
    host: Annotated[
        str,
        typer.Option("--host", help="Address to listen on; others than loopback need a key.", rich_help_panel=NETWORK),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes a free port.", rich_help_panel=NETWORK)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api_key",
            envvar="LONGSPEC_API_KEY",
            help="Key that clients must send. The environment variable hides it from the list of processes.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            "--served_name", help="Model id for clients.", show_default="name of the pair", rich_help_panel=NETWORK
        ),
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            "--generation_config",
            help="Sampling settings of requests that name none: auto, the target's; none, temperature 1.",
            rich_help_panel=LIMITS,
        ),
    ] = "auto",
    max_rows: Annotated[
        int | None,
        typer.Option(
            "--max_rows",
            min=1,
            help="Requests that are decoded together.",
            show_default=f"{ROWS}; {ROWS_ON_CPU} on a CPU",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max_queue", min=1, help="Waiting requests; further ones get 429.", rich_help_panel=LIMITS)
    ] = 256,
    max_seconds: Annotated[
        float, typer.Option("--max_seconds", min=1, help="Longest time of a request.", rich_help_panel=LIMITS)
    ] = 600,
    drain_seconds: Annotated[
        int,
        typer.Option("--drain_seconds", min=0, help="Time for running requests after SIGTERM.", rich_help_panel=LIMITS),
    ] = 60,
) -> None:
    """Serve a pair over HTTP: OpenAI's API under /v1, a chat page at /, /health and /metrics."""
    from longspec.cli.pair import choose_model, note_plain_format, open_pair
    from longspec.errors import UserError
    from longspec.extras import extra
    from longspec.inference.engine.requests import NotServing
    from longspec.inference.engine.scheduler import Scheduler
    from longspec.inference.options import FILE_OPTIONS
    from longspec.inference.process_group import only_rank_zero

    with extra("serve"):
        from longspec.inference.server.app import build_app
        from longspec.inference.server.limits import Limits
        from longspec.inference.server.sampling_defaults import WITHOUT_CONFIG, SamplingDefaults
        from longspec.inference.server.served_model import ServedModel
        from longspec.inference.server.serving import allowed_hosts, http_server, listen

    name = choose_model(pair, model)
    drafting = drafting_options(tree_shape, tree_rule, tree_nodes, lookup_branches, gamma)
    with ExitStack() as stack:
        stack.enter_context(only_rank_zero(tp_size, device))
        # A port in use is reported before the weights load, and clients that connect meanwhile wait.
        listening = stack.enter_context(listen(host, port, api_key))
        applied = FILE_OPTIONS if generation_config == "auto" else None
        loaded = open_pair(name, draft, method, dtype, device, chat_template_kwargs, applied=applied)
        note_plain_format(loaded)
        defaults = WITHOUT_CONFIG
        if generation_config == "auto":
            defaults = SamplingDefaults.read(loaded.model.generation_config, loaded.model.config.vocab_size)
        rows = max_rows or (ROWS_ON_CPU if loaded.model.device.type == "cpu" else ROWS)
        scheduler = Scheduler(loaded.model, method=loaded.method, max_rows=rows, max_queue=max_queue, **drafting)
        served = ServedModel(
            served_name or loaded.name,
            loaded.method,
            loaded.tokenizer,
            _encoder(loaded, chat_template_kwargs),
            frozenset(loaded.stop_ids),
            scheduler.longest,
            loaded.model.config.vocab_size,
            defaults,
        )
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        reserved = f"{_gib(scheduler.cache_bytes)} for {rows} rows of up to {scheduler.longest} tokens"
        print(f"memory: {_gib(weights)} of weights, {reserved} (--max_rows)", file=sys.stderr)
        try:
            scheduler.start(served.usual)
            # The choices of a request are queued together, so they must fit into an empty queue.
            limits = Limits(max_seconds=max_seconds, max_choices=min(Limits.max_choices, max_queue))
            app = build_app(served, scheduler, limits, api_key, allowed_hosts(host, api_key))
            print(f"{served.name} on {loaded.model.device}, method {loaded.method}; {defaults}", file=sys.stderr)
            http_server(app, drain_seconds).run(sockets=[listening])
        except NotServing as error:
            raise UserError(f"{loaded.name}: {error}") from error
        finally:
            scheduler.close()


def _encoder(loaded: LoadedPair, chat_template_kwargs: str | None) -> Callable[..., list[list[int]]]:
    """`ServedModel.encode` of a pair. chat_template_kwargs: those of the command, as JSON."""
    from longspec.errors import UserError

    fixed = set(json.loads(chat_template_kwargs or "{}"))

    def encode(prompts: list[str | list[Turn]], variables: Mapping[str, Any] | None = None) -> list[list[int]]:
        # The command's values come after those of a request in the template, and replace them.
        for name in fixed.intersection(variables or ()):
            raise UserError(f"chat_template_kwargs: {name} is fixed by the server's --chat_template_kwargs")
        return (loaded.with_template_variables(variables) if variables else loaded).encode(prompts)

    return encode


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
