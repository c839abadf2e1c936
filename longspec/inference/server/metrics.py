"""Figures of a server in the format of Prometheus."""

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longspec.inference.engine.requests import Snapshot

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
"""Bucket limits in seconds."""
RATE_SECONDS = 10.0
"""The time that the gauge of tokens/s looks back."""


class Metrics(Collector):
    """All figures of one server. Those of the scheduler are read when somebody asks for them."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        name, text = "longspec_time_to_first_token_seconds", "Time from submission to the first token."
        self._first_token = Histogram(name, text, buckets=TTFT_BUCKETS, registry=self._registry)
        text = "Time per token after the first: the time since the previous round over the round's tokens."
        name = "longspec_inter_token_latency_seconds"
        self._inter_token = Histogram(name, text, buckets=TOKEN_BUCKETS, registry=self._registry)
        self._recent: deque[tuple[float, int]] = deque()
        """The time of each round and its new tokens."""
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def note(self, now: float, started: float, newest: float | None, count: int) -> None:
        """Note a round's `count` tokens of a request. Times are of time.perf_counter(): the present, the request's
        submission, and its previous round, if any."""
        if newest is None:
            self._first_token.observe(now - started)
        else:
            for _ in range(count):
                self._inter_token.observe((now - newest) / count)
        self._recent.append((now, count))
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        passes = now.row_rounds
        self._forget(time.perf_counter())
        speed = sum(count for _, count in self._recent) / RATE_SECONDS
        for name, text, value in (
            ("queue_length", "Requests that wait for a row.", now.queued),
            ("running_rows", "Rows that hold a request.", now.running),
            ("max_rows", "Rows of the batch.", now.max_rows),
            ("tokens_per_second", f"Tokens/s over the last {RATE_SECONDS:g} seconds.", speed),
            ("cuda_memory_bytes", "Allocated CUDA memory; 0 on a CPU.", torch.cuda.memory_allocated()),
            ("acceptance_length", "Mean tokens per verification pass.", now.decoded_tokens / passes if passes else 0.0),
        ):
            yield GaugeMetricFamily(f"longspec_{name}", text, value)
        for name, text, value in (
            ("requests", "Submitted requests.", now.requests),
            ("prompt_tokens", "Prompt tokens.", now.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that a cached prefix saved.", now.cached_prompt_tokens),
            ("new_tokens", "Emitted tokens.", now.new_tokens),
            ("rounds", "Rounds of the batch.", now.rounds),
            ("verification_passes", "Verification passes, counted per row.", passes),
            ("accepted_tokens", "Emitted tokens that were proposed.", now.accepted_tokens),
            ("decoded_tokens", "Tokens emitted by verification passes.", now.decoded_tokens),
        ):
            yield CounterMetricFamily(f"longspec_{name}", text, value)
        finished = CounterMetricFamily("longspec_finished_requests", "Finished requests by reason.", labels=("reason",))
        for reason, count in sorted(now.finished.items()):
            finished.add_metric((reason,), count)
        yield finished
