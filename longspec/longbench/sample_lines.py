"""The JSON line of a sample, which also holds the figures of the sample's batch."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspec.inference.stats import GenerationStats


@dataclass(frozen=True)
class SampleResult:
    """One prompt and its continuation."""

    id: str
    """Id of the record."""
    prompt_tokens: int
    """Number of tokens in the prompt."""
    token_ids: list[int]
    """The new tokens, up to and including EOS."""
    text: str
    """The new tokens as text."""


def batch_lines(results: Sequence[SampleResult], stats: GenerationStats, first: int) -> list[dict[str, Any]]:
    """The lines of a batch. stats: the batch's; first: number of its first sample.

    Times and memory belong to the batch, counts to the row.
    """
    rows = zip(results, stats.row_rounds, strict=True)
    return [_sample_line(index, result, rounds, first, stats) for index, (result, rounds) in enumerate(rows, first)]


def _sample_line(index: int, result: SampleResult, rounds: int, first: int, stats: GenerationStats) -> dict[str, Any]:
    shape = {"tree_shape": list(stats.tree_shape)} if stats.tree_shape else {}
    return {
        "index": index,
        "id": result.id,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "batch_rows": len(stats.row_rounds),
        # The first token comes from prefill.
        "acceptance_length": (len(result.token_ids) - 1) / rounds if rounds else None,
        "rounds": rounds,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "tokens_per_second": number_or_none(stats.tokens_per_second),
        **shape,
        "batch": {
            "first": first,
            "rounds": stats.rounds,
            "decoded_tokens": stats.decoded_tokens,
            "accepted_by_depth": stats.accepted_by_depth,
            "peak_memory_bytes": stats.peak_memory_bytes or _resident_peak(),
            **stats.setup,
            **({"rounds_by_plan": stats.rounds_by_plan} if stats.rounds_by_plan else {}),
        },
        "text": result.text,
        "token_ids": result.token_ids,
    }


def read_line(raw: bytes) -> dict[str, Any]:
    """A line of `samples.jsonl` without its answer. Raises ValueError for any other line."""
    try:
        line = json.loads(raw)
        kept = {name: value for name, value in line.items() if name not in ("text", "token_ids")}
        batch_stats(kept)
        return {"index": int(kept["index"]), "new_tokens": kept["new_tokens"]} | kept
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a line of results") from error


def batch_stats(line: dict[str, Any]) -> GenerationStats:
    """The figures of the whole batch that a line belongs to."""
    # The row index `first` identifies the batch and is no figure.
    counts = {name: value for name, value in line["batch"].items() if name != "first"}
    return GenerationStats(**counts, ttft_s=line["ttft_s"], decode_s=line["decode_s"])


def _resident_peak() -> int:
    """Peak resident memory of this process in bytes, for runs on a CPU."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def number_or_none(value: float) -> float | None:
    """`value`, or None for nan, which JSON does not have."""
    return None if math.isnan(value) else value
