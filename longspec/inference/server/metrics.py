"""Figures of a server in the format of Prometheus."""

from collections.abc import Callable, Iterator

import torch
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longspec.inference.engine.requests import Snapshot

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
"""Bucket limits in seconds."""


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

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        passes = now.row_rounds
        for name, text, value in (
            ("queue_length", "Requests that wait for a row.", now.queued),
            ("running_rows", "Rows that hold a request.", now.running),
            ("max_rows", "Rows of the batch.", now.max_rows),
            ("cuda_memory_bytes", "Allocated CUDA memory; 0 on a CPU.", torch.cuda.memory_allocated()),
            ("acceptance_length", "Mean tokens per verification pass.", now.decoded_tokens / passes if passes else 0.0),
        ):
            yield GaugeMetricFamily(f"longspec_{name}", text, value)
        for name, text, value in (
            ("requests", "Submitted requests.", now.requests),
            ("prompt_tokens", "Prompt tokens.", now.prompt_tokens),
            ("cached_prompt_tokens", "Prompt tokens that a cached prefix saved.", now.cached_prompt_tokens),
            ("new_tokens", "Emitted tokens; their rate is the tokens/s.", now.new_tokens),
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
