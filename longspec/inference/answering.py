"""Answers to many prompts with continuous batching: for files of prompts, evaluation and regenerated text."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from longspec.errors import UserError
from longspec.inference.engine.prefill import PREFILL_TOKENS
from longspec.inference.engine.request_engine import RequestEngine
from longspec.inference.engine.requests import Event, Finished, Request, Tokens
from longspec.inference.methods import Drafting
from longspec.inference.stats import GenerationStats, pool
from longspec.models.glide import GlideMixin

OnTokens = Callable[[int, list[int], bool], bool | None]
"""Called with the number of a request, its next tokens, and whether it has ended; True ends all requests."""


def answer_all(
    model: GlideMixin,
    drafting: Drafting,
    requests: Sequence[Request],
    max_rows: int,
    on_tokens: OnTokens,
    attention: str = "auto",
    compile: bool = True,
) -> GenerationStats:
    """Answer requests, `max_rows` at a time or as many as fit into memory. A row that ends goes to the next request.

    drafting: checked settings. attention, compile: as for `longspec.generate`. The tokens of a request that is greedy
    or has a seed do not depend on the others. Returns the counts and times of all requests; prompts are read between
    rounds, and `ttft_s` is the time of this. Raises UserError, with the number of the request, for one that cannot be
    answered, such as one whose logits are NaN.
    """
    # The longest first, so that no long answer runs alone at the end.
    waiting = sorted(range(len(requests)), key=lambda number: requests[number].longest, reverse=True)
    stats: list[GenerationStats] = []
    while waiting:
        start = time.perf_counter()
        rows, longest = min(max_rows, len(waiting)), requests[waiting[0]].longest
        engine = RequestEngine(model, drafting, rows, None, longest, PREFILL_TOKENS, attention, compile, False)
        build_s = time.perf_counter() - start
        engine.prepare(captures=False)
        # All rows have the capacity of the longest request. If memory is short, shorter ones come with more rows.
        shortest = 0 if engine.batch.max_rows == rows else longest // 2
        own = [number for number in waiting if requests[number].longest >= shortest]
        waiting = waiting[len(own) :]
        run = _Run(engine, on_tokens, len(requests))
        for number in own:
            engine.add(requests[number], partial(run.take, number))
        measure_s = time.perf_counter() - start - build_s
        run.play()
        stats.append(replace(run.stats(drafting), build_s=build_s, measure_s=measure_s))
        if run.is_stopped:
            break
        del run, engine
        gc.collect()  # its memory is free for the next one
    return stats[0] if len(stats) == 1 else pool(stats)


class _Run:
    """The requests of one engine."""

    def __init__(self, engine: RequestEngine, on_tokens: OnTokens, count: int) -> None:
        self.engine = engine
        self.on_tokens = on_tokens
        self.is_stopped = False
        self.problem: str | None = None
        self.row_rounds = [0] * count
        self.new_tokens = [0] * count
        self.accepted_by_depth = [0] * engine.batch.depth
        self.seconds = 0.0

    def play(self) -> None:
        """Step until all requests have ended, or one of them cannot be answered."""
        device, start = self.engine.batch.device, time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        while self.engine.step() and self.problem is None and not self.is_stopped:
            pass
        self.seconds = time.perf_counter() - start
        self.engine.close()
        if self.problem is not None:
            raise UserError(self.problem)

    def take(self, number: int, event: Event) -> None:
        if isinstance(event, Tokens):
            for depth in range(sum(origin != "target" for origin in event.origins)):
                self.accepted_by_depth[depth] += 1
            self.new_tokens[number] += len(event.ids)
            ended = self.on_tokens(number, event.ids, False)
        elif not isinstance(event, Finished):
            return  # scores of a prompt, which these requests do not ask for
        elif event.reason == "error":
            self.problem = self.problem or f"prompt {number}, {event.message}"
            return
        else:
            self.row_rounds[number] = event.timings.rounds
            ended = self.on_tokens(number, [], True)
        self.is_stopped |= bool(ended)

    def stats(self, drafting: Drafting) -> GenerationStats:
        """The counts and times of the run, without those of its setup."""
        worker, device = self.engine.worker, self.engine.batch.device
        rounds = sum(self.row_rounds)
        plans = {} if worker.controller is None else worker.controller.played
        return GenerationStats(
            rounds=rounds,
            row_rounds=self.row_rounds,
            decoded_tokens=sum(max(count - 1, 0) for count in self.new_tokens),  # prefill chooses the first one
            accepted_by_depth=self.accepted_by_depth,
            ttft_s=worker.counts.prefill_s,
            decode_s=self.seconds - worker.counts.prefill_s,
            peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            tree_shape=tuple(drafting.tree_shape),
            tree_nodes=self.engine.batch.nodes if drafting.method == "tree" else 0,
            rounds_by_plan={plan.name: count for plan, count in plans.items()},
        )
