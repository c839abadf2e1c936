"""The summary of a run, which pools the figures of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longspec.errors import UserError
from longspec.inference.device import device_name, versions
from longspec.inference.stats import pool
from longspec.jobs.results import Line, json_bytes
from longspec.longbench.sample_lines import batch_stats, number_or_none
from longspec.replacing import replacing


def summarize(lines: Sequence[Line], processes: int, device: torch.device, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of `summary.json`: `facts`, then the pooled figures of all lines.

    processes: number of ranks of the largest launch that wrote lines.
    """
    # The rows of a batch share its figures, so each batch counts once.
    batches = {line["batch"]["first"]: batch_stats(line) for line in lines}
    pooled = pool(list(batches.values()))
    samples = len(lines)
    return facts | {
        "samples": samples,
        "processes": processes,
        "mean_acceptance_length": number_or_none(pooled.mean_acceptance_length),
        "accepted_by_depth": pooled.accepted_by_depth,
        "rounds": pooled.rounds,
        "decoded_tokens": pooled.decoded_tokens,
        "new_tokens": sum(line["new_tokens"] for line in lines),
        "tokens_per_second": number_or_none(pooled.tokens_per_second),
        "decode_s": pooled.decode_s,
        "ttft_s": sum(line["ttft_s"] for line in lines) / samples if samples else None,
        "peak_memory_bytes": pooled.peak_memory_bytes,
        "device": device_name(device),
        "versions": versions(),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically. Raises UserError."""
    try:
        with replacing(path) as unfinished:
            unfinished.write_bytes(json_bytes(content, indent=2) + b"\n")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); the same command continues once this is fixed"
        ) from error


def table(summary: dict[str, Any]) -> str:
    """The main figures of a summary, one per line."""
    memory = summary["peak_memory_bytes"] / 2**30
    rows = [
        ("model", summary["model"]),
        ("task", summary["task"]),
        ("method", summary["method"]),
        ("samples", summary["samples"]),
        ("acceptance length", _shown(summary["mean_acceptance_length"], "{:.3f}")),
        ("tokens/s", _shown(summary["tokens_per_second"], "{:.1f}")),
        ("time to first token", _shown(summary["ttft_s"], "{:.3f} s")),
        ("peak memory", f"{memory:.2f} GiB"),
        ("device", summary["device"]),
    ]
    return "\n".join(f"{name:<20} {value}" for name, value in rows)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
