"""`longspec serve`: the options of the HTTP server; `longspec.inference.server` holds it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from longspec.cli.options import DraftingOptions, MethodOptions, PairArgument, PairOptions, command, option
from longspec.errors import UserError
from longspec.extras import extra

if TYPE_CHECKING:
    from longspec.cli.pair import LoadedPair
    from longspec.data.aligners import Turn
    from longspec.inference.engine.scheduler import Scheduler

NETWORK, LIMITS = "Network", "Limits"
ROWS, ROWS_ON_CPU = 16, 4
"""Default number of rows. Each reserves memory for the whole context, and a CPU gains little from more."""


@dataclass(frozen=True)
class ServeOptions:
    host: str = option("127.0.0.1", "Address to listen on; others than loopback need a key.", NETWORK)
    port: int = option(8000, "0 takes a free port.", NETWORK, min=0, max=65535)
    api_key: str | None = option(
        None,
        "Key that clients must send. The environment variable hides it from the list of processes.",
        NETWORK,
        envvar="LONGSPEC_API_KEY",
    )
    served_name: str | None = option(None, "Model id for clients.", NETWORK, show_default="name of the pair")
    generation_config: Literal["auto", "none"] = option(
        "auto", "Sampling settings of requests that name none: auto, the target's; none, temperature 1.", LIMITS
    )
    max_rows: int | None = option(
        None, "Requests that are decoded together.", LIMITS, min=1, show_default=f"{ROWS}; {ROWS_ON_CPU} on a CPU"
    )
    max_queue: int = option(256, "Waiting requests; further ones get 429.", LIMITS, min=1)
    max_seconds: float = option(600, "Longest time of a request.", LIMITS, min=1)
    drain_seconds: int = option(60, "Time for running requests after SIGTERM.", LIMITS, min=0)


@command()
def serve(
    source: PairOptions,
    method: MethodOptions,
    drafting: DraftingOptions,
    options: ServeOptions,
    pair: PairArgument = None,
) -> None:
    """Serve a pair over HTTP: OpenAI's API under /v1, a chat page at /, /health and /metrics."""
    from transformers import GenerationConfig

    from longspec.cli.pair import open_pair
    from longspec.inference.engine.requests import NotServing
    from longspec.inference.engine.scheduler import Scheduler
    from longspec.inference.options import FILE_OPTIONS
    from longspec.inference.process_group import only_rank_zero

    with extra("serve"):
        from longspec.inference.server.app import build_app
        from longspec.inference.server.limits import Limits
        from longspec.inference.server.served_model import ServedModel
        from longspec.inference.server.serving import allowed_hosts, http_server, listen, url_of

    source, arguments = source.named(pair), drafting.arguments(method.method)
    with ExitStack() as stack:
        stack.enter_context(only_rank_zero(method.tp_size, source.device))
        # A port in use is reported before the weights load, and clients that connect meanwhile wait.
        listening = stack.enter_context(listen(options.host, options.port, options.api_key))
        applied = FILE_OPTIONS if options.generation_config == "auto" else None
        loaded = open_pair(source, method.method, applied=applied)
        config = GenerationConfig() if applied is None else loaded.model.generation_config
        rows = options.max_rows or (ROWS_ON_CPU if loaded.model.device.type == "cpu" else ROWS)
        arguments |= {"max_rows": rows, "max_queue": options.max_queue, "deterministic": source.deterministic}
        scheduler = Scheduler(loaded.model, loaded.method, **arguments)
        name, longest = options.served_name or loaded.name, scheduler.longest
        encode = _encoder(loaded, source.chat_template_kwargs)
        stop_ids, vocab_size = frozenset(loaded.stop_ids), loaded.model.config.vocab_size
        served = ServedModel(name, loaded.method, loaded.tokenizer, encode, stop_ids, longest, vocab_size, config)
        print(_memory(loaded, scheduler, rows), file=sys.stderr)
        try:
            scheduler.start(served.sampling({}, stop_ids))
            # The choices of a request are queued together, so they must fit into an empty queue.
            limits = Limits(max_seconds=options.max_seconds, max_choices=min(Limits.max_choices, options.max_queue))
            app = build_app(served, scheduler, limits, options.api_key, allowed_hosts(options.host, options.api_key))
            note = f"{served.name} on {loaded.model.device}, method {loaded.method}; {served.described_defaults}"
            print(f"{note}\nlistening on {url_of(listening)}", file=sys.stderr, flush=True)
            http_server(app, options.drain_seconds).run(sockets=[listening])
        except NotServing as error:
            raise UserError(f"{loaded.name}: {error}") from error
        finally:
            scheduler.close()


def _memory(loaded: "LoadedPair", scheduler: "Scheduler", rows: int) -> str:
    """The line that says what weights and cache take."""
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters()) / 2**30
    reserved = f"{scheduler.cache_bytes / 2**30:.1f} GiB for {rows} rows of up to {scheduler.longest} tokens"
    return f"memory: {weights:.1f} GiB of weights, {reserved} (--max_rows)"


def _encoder(loaded: "LoadedPair", chat_template_kwargs: str | None) -> Callable[..., list[list[int]]]:
    """`ServedModel.encode` of a pair. chat_template_kwargs: the command's, which would replace those of a request."""
    fixed = json.loads(chat_template_kwargs or "{}")

    def encode(prompts: "Sequence[str | list[Turn]]", variables: Mapping[str, Any] | None = None) -> list[list[int]]:
        for name in fixed.keys() & (variables or {}):
            raise UserError(f"chat_template_kwargs: {name} is fixed by the server's --chat_template_kwargs")
        return loaded.encode(prompts, variables)

    return encode
