"""Throughput and latency of the scheduler, compared with `generate` on the same prompts.

`python -m benchmarks.serving` runs the embedded pair, or `--pair NAME`, and prints one JSON line last. Prompts are
slices of this repository's documents.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from time import perf_counter
from typing import Any

from longspec.cli.pair import LoadedPair, Sampling, open_pair
from longspec.errors import reports_user_errors
from longspec.inference.server.requests import Event, Finished, Request
from longspec.inference.server.scheduler import Scheduler

DOCUMENTS = sorted((Path(__file__).resolve().parents[1] / "docs").rglob("*.md"))


@reports_user_errors
def main() -> None:
    options = parse_options()
    pair = open_pair(options.pair, options.draft, "tree")
    prompts = ragged_prompts(pair, options)
    shape = tuple(options.tree_shape)
    static = {method: generate_speed(pair, prompts, method, shape, options) for method in ("tree", "vanilla")}
    single = generate_speed(pair, prompts[:1], "tree", shape, options)
    scheduler = Scheduler(
        pair.model, tree_shape=shape, max_rows=options.rows, prefill_chunk=options.prefill_chunk, memory=options.memory
    )
    scheduler.start()
    try:
        serve(scheduler, prompts[:1], 8)  # warm-up
        served_single = serve(scheduler, prompts[:1], options.new_tokens)
        served = serve(scheduler, prompts, options.new_tokens)
        served_vanilla = serve(scheduler, prompts, options.new_tokens, speculate=False)
        turns = second_turn(scheduler, ragged_prompts(pair, options, offset=50_000)[-1], options.new_tokens)
    finally:
        scheduler.close()
    results = {
        "single_tokens_per_s": served_single,
        "single_over_generate": served_single / single,
        "concurrent_tokens_per_s": served,
        "concurrent_over_static_batch": served / static["tree"],
        "concurrent_over_static_vanilla": served / static["vanilla"],
        "concurrent_over_served_vanilla": served / served_vanilla,
        "first_turn_ttft_s": turns[0],
        "second_turn_ttft_s": turns[1],
        "second_over_first_ttft": turns[1] / turns[0],
    }
    print(json.dumps({"benchmark": "serving", "pair": pair.name, **results, "config": vars(options)}))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--pair", help="name, hub id or folder; without it the embedded pair")
    add("--draft")
    add("--rows", type=int, default=16)
    add("--shortest", type=int, default=1024, help="tokens of the shortest prompt")
    add("--longest", type=int, default=4096, help="tokens of the longest prompt")
    add("--new_tokens", type=int, default=256)
    add("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    add("--prefill_chunk", type=int, default=1024)
    add("--memory", type=int, help="bytes for the caches")
    return parser.parse_args()


def ragged_prompts(pair: LoadedPair, options: argparse.Namespace, offset: int = 0) -> list[list[int]]:
    """One prompt per row, of evenly spaced lengths, each from another place of the documents."""
    text = "\n".join(path.read_text() for path in DOCUMENTS)
    ids = pair.encode([text])[0]
    step = (options.longest - options.shortest) // max(1, options.rows - 1)
    starts = [(offset + 997 * row) % max(1, len(ids) - options.longest) for row in range(options.rows)]
    return [ids[start : start + options.shortest + step * row] for row, start in enumerate(starts)]


def generate_speed(
    pair: LoadedPair, prompts: list[list[int]], method: str, shape: tuple[int, ...], options: argparse.Namespace
) -> float:
    """Tokens/s of a static batch, prefill included."""
    settings: dict[str, Any] = {"method": method, "tree_shape": shape, "eos_token_id": []}
    pair.generate(prompts, Sampling(8), **settings)  # warm-up
    start = perf_counter()
    output = pair.generate(prompts, Sampling(options.new_tokens), **settings)
    return sum(map(len, output.new_tokens)) / (perf_counter() - start)


class Run:
    """A request and its answer."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.ids: list[int] = []
        self.end = Finished("error")
        self.over = threading.Event()
        scheduler.submit(request, self.take)

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            self.end = event
            self.over.set()
        else:
            self.ids += event.ids

    def wait(self) -> None:
        self.over.wait()
        if self.end.reason != "length":
            raise RuntimeError(f"{self.end.reason}: {self.end.message}")


def serve(scheduler: Scheduler, prompts: list[list[int]], new_tokens: int, speculate: bool = True) -> float:
    """Tokens/s of prompts that are submitted at once, prefill included."""
    forget(scheduler)
    start = perf_counter()
    runs = [Run(scheduler, Request(prompt, new_tokens, speculate=speculate)) for prompt in prompts]
    for run in runs:
        run.wait()
    return sum(len(run.ids) for run in runs) / (perf_counter() - start)


def forget(scheduler: Scheduler) -> None:
    """Fill all rows with short prompts, so that nothing is reused."""
    rows = scheduler.snapshot().max_rows
    for run in [Run(scheduler, Request([row, row], 2)) for row in range(rows)]:
        run.wait()


def second_turn(scheduler: Scheduler, history: list[int], new_tokens: int) -> list[float]:
    """TTFT of a turn with `history` as its prompt, and of the next one, which appends 64 tokens to the answer."""
    forget(scheduler)
    prompt, times = history, []
    for _ in range(2):
        run = Run(scheduler, Request(prompt, new_tokens))
        run.wait()
        times.append(run.end.timings.ttft_s)
        prompt = [*prompt, *run.ids, *history[:64]]
    return times


if __name__ == "__main__":
    main()
