"""What a run leaves behind: a JSON line for each sample, a summary of them all, and a short table."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from longspec.inference.generate import GenerationStats

SAMPLES_NAME = "samples.jsonl"
SUMMARY_NAME = "summary.json"


@dataclass(frozen=True)
class SampleResult:
    """One prompt and its continuation."""

    id: str
    prompt_tokens: int
    token_ids: list[int]
    """The new tokens, up to and with the EOS."""
    text: str


class Report:
    """Collects a run's results in `folder`; what an earlier run left there is replaced."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SUMMARY_NAME).unlink(missing_ok=True)
        (self.folder / SAMPLES_NAME).write_text("")
        self.batches: list[GenerationStats] = []
        self.samples = 0
        self.new_tokens = 0
        self.ttft_of_samples = 0.0

    def add(self, results: Sequence[SampleResult], stats: GenerationStats) -> None:
        """Append one line for each row of a batch; its times are those of the batch that it ran in."""
        with (self.folder / SAMPLES_NAME).open("a", encoding="utf-8") as handle:
            for result, rounds in zip(results, stats.row_rounds, strict=True):
                line = _sample_line(result, rounds, len(results), stats)
                handle.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.batches.append(stats)
        self.samples += len(results)
        self.new_tokens += sum(len(result.token_ids) for result in results)
        self.ttft_of_samples += stats.ttft_s * len(results)

    def finish(self, device: torch.device, **facts: Any) -> dict[str, Any]:
        """Write `summary.json`, whole or not at all: `facts` first, then the pooled figures; return it."""
        pooled = pool(self.batches)
        summary = facts | {
            "samples": self.samples,
            "mean_acceptance_length": _number(pooled.mean_acceptance_length),
            "accepted_by_depth": pooled.accepted_by_depth,
            "rounds": pooled.rounds,
            "decoded_tokens": pooled.decoded_tokens,
            "new_tokens": self.new_tokens,
            "tokens_per_second": _number(pooled.tokens_per_second),
            "decode_s": pooled.decode_s,
            "ttft_s": self.ttft_of_samples / self.samples if self.samples else None,
            "peak_memory_bytes": pooled.peak_memory_bytes or _resident_peak(),
            "device": device_name(device),
            "versions": versions(),
        }
        unfinished = self.folder / (SUMMARY_NAME + ".tmp")
        unfinished.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(unfinished, self.folder / SUMMARY_NAME)
        return summary


def pool(batches: Sequence[GenerationStats]) -> GenerationStats:
    """The counts and times of several calls added up, so that every verification pass weighs the same."""
    depths = [stats.accepted_by_depth for stats in batches]
    return GenerationStats(
        rounds=sum(stats.rounds for stats in batches),
        decoded_tokens=sum(stats.decoded_tokens for stats in batches),
        accepted_by_depth=[sum(column) for column in zip_longest(*depths, fillvalue=0)],
        ttft_s=sum(stats.ttft_s for stats in batches),
        decode_s=sum(stats.decode_s for stats in batches),
        peak_memory_bytes=max((stats.peak_memory_bytes for stats in batches), default=0),
    )


def table(summary: dict[str, Any]) -> str:
    """A summary's main figures, one a line."""
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


def device_name(device: torch.device) -> str:
    """The GPU's own name, or the processor's kind."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "triton", "longspec"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _sample_line(result: SampleResult, rounds: int, rows: int, stats: GenerationStats) -> dict[str, Any]:
    return {
        "id": result.id,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "batch_rows": rows,
        "acceptance_length": (len(result.token_ids) - 1) / rounds if rounds else None,
        "rounds": rounds,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "tokens_per_second": _number(stats.tokens_per_second),
        **({"tree_shape": list(stats.tree_shape)} if stats.tree_shape else {}),
        "text": result.text,
        "token_ids": result.token_ids,
    }


def _resident_peak() -> int:
    """Most bytes this process has held resident: the peak memory of a run on a CPU."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
