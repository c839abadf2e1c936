"""The lines of samples, each with its figures, and the summary that pools them."""

import json
import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longspec.inference.device import device_name, versions
from longspec.inference.stats import GenerationStats, pool
from longspec.jobs.results import Line, json_bytes
from longspec.longbench.prompts import TaskPrompt
from longspec.replacing import write_atomically


def sample_line(
    prompt: TaskPrompt, token_ids: list[int], text: str, stats: GenerationStats, index: int, rows: int = 1
) -> Line:
    """The line of a sample. token_ids, text: the new tokens, up to and including EOS. stats: the sample's own. rows:
    samples that are decoded at the same time."""
    rounds = stats.rounds
    resident_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in bytes, for runs on a CPU
    shape = {"tree_shape": list(stats.tree_shape)} if stats.tree_shape else {}
    return {
        "index": index,
        "id": prompt.id,
        "prompt_tokens": len(prompt.token_ids),
        "new_tokens": len(token_ids),
        "batch_rows": rows,
        # The first token comes from prefill.
        "acceptance_length": (len(token_ids) - 1) / rounds if rounds else None,
        "rounds": rounds,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "tokens_per_second": _number_or_none(stats.tokens_per_second),
        **shape,
        "batch": {
            "rounds": stats.rounds,
            "decoded_tokens": stats.decoded_tokens,
            "accepted_by_depth": stats.accepted_by_depth,
            "peak_memory_bytes": stats.peak_memory_bytes or resident_peak,
            **stats.setup,
            **({"rounds_by_plan": stats.rounds_by_plan} if stats.rounds_by_plan else {}),
        },
        "text": text,
        "token_ids": token_ids,
    }


def read_line(raw: bytes) -> Line:
    """A line of `samples.jsonl` without its answer. Raises ValueError for any other line."""
    try:
        line = json.loads(raw)
        kept = {name: value for name, value in line.items() if name not in ("text", "token_ids")}
        _stats(kept)
        return kept | {"index": int(kept["index"]), "new_tokens": int(kept["new_tokens"])}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError("not a line of results") from error


def _stats(line: Line) -> GenerationStats:
    return GenerationStats(**line["batch"], ttft_s=line["ttft_s"], decode_s=line["decode_s"])


def _number_or_none(value: float) -> float | None:
    """`value`, or None for nan, which JSON does not have."""
    return None if math.isnan(value) else value


def summarize(
    by_item: Mapping[int, Line], processes: int, device: torch.device, facts: dict[str, Any]
) -> dict[str, Any]:
    """`facts` and the pooled figures of all lines. processes: ranks of the largest launch that wrote lines."""
    lines = [by_item[item] for item in sorted(by_item)]
    pooled = pool([_stats(line) for line in lines])
    samples = len(lines)
    return facts | {
        "samples": samples,
        "processes": processes,
        "mean_acceptance_length": _number_or_none(pooled.mean_acceptance_length),
        "accepted_by_depth": pooled.accepted_by_depth,
        "rounds": pooled.rounds,
        "decoded_tokens": pooled.decoded_tokens,
        "new_tokens": sum(line["new_tokens"] for line in lines),
        "tokens_per_second": _number_or_none(pooled.tokens_per_second),
        "decode_s": pooled.decode_s,
        "ttft_s": sum(line["ttft_s"] for line in lines) / samples if samples else None,
        "peak_memory_bytes": pooled.peak_memory_bytes,
        "device": device_name(device),
        "versions": versions(),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically. Raises UserError."""
    write_atomically(path, json_bytes(content, indent=2) + b"\n")


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
