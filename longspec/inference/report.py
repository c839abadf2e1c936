"""The results of a run: a JSON line per sample, a summary that pools them, and a short table."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from longspec import __version__
from longspec.errors import UserError
from longspec.inference.decoder import GenerationStats

RUN_NAME = "run.json"
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
    """The results in a run's folder: one line per sample, appended batch by batch, and at the end a summary.

    It begins with the complete lines that an interrupted run left. A cut last line does not count; its sample is run
    again. With `resume=False` it begins empty; the first `add` then removes earlier results.
    """

    def __init__(self, folder: str | Path, resume: bool = True) -> None:
        """Only reads. Raises UserError for complete lines that are not a report's."""
        self.folder = Path(folder)
        self.resume = resume
        self.lines: list[dict[str, Any]] = []
        """The lines on disk, without texts and token ids."""
        self.size = 0
        """Bytes of the complete lines on disk."""
        self._record: dict[str, Any] | None = None
        """The configuration that the first `add` stores."""
        if resume and (self.folder / SAMPLES_NAME).exists():
            self._read()

    def _read(self) -> None:
        path = self.folder / SAMPLES_NAME
        with path.open("rb") as handle:
            for number, raw in enumerate(handle, 1):
                if raw.endswith(b"\n"):
                    self.lines.append(_figures(raw, f"{path}, line {number}"))
                    self.size += len(raw)

    @property
    def done(self) -> set[int]:
        """Indices of the samples that have a line."""
        return {line["index"] for line in self.lines}

    def begin(self, record: dict[str, Any]) -> None:
        """Set the run's configuration, which the first `add` stores.

        The folder does not change before, so that a run without any result leaves the earlier results in place.
        """
        self._record = record

    def _start(self) -> None:
        """Store the run's configuration and cut off what does not belong to it. Raises OSError."""
        if self._record is None:
            return
        samples = self.folder / SAMPLES_NAME
        if not self.resume:
            (self.folder / SUMMARY_NAME).unlink(missing_ok=True)
            samples.unlink(missing_ok=True)
        if samples.exists():
            os.truncate(samples, self.size)
        write_json(self.folder / RUN_NAME, self._record)
        self._record = None

    def add(self, results: Sequence[SampleResult], stats: GenerationStats, first: int) -> None:
        """Append a line for each row of a batch, whose first row is sample `first` of the run.

        Times are those of the batch. Rows that have a line already are left out: a batch that was cut off in writing is
        run again as a whole, because its seed is the batch's. Raises UserError, with the earlier lines intact, if the
        lines cannot be written.
        """
        done = self.done
        lines = [
            _sample_line(index, result, rounds, len(results), first, stats)
            for index, (result, rounds) in enumerate(zip(results, stats.row_rounds, strict=True), first)
            if index not in done
        ]
        content = b"".join(_encoded(line) + b"\n" for line in lines)
        with self._reported():
            self._start()
            self._append(content)
        self.lines += [_without_answer(line) for line in lines]
        self.size += len(content)

    def _append(self, content: bytes) -> None:
        with (self.folder / SAMPLES_NAME).open("ab", buffering=0) as handle:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[handle.write(rest) :]
                os.fsync(handle.fileno())
            except OSError:
                handle.truncate(self.size)
                raise

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be written ({error.strerror}); {len(self.lines)} samples are saved; "
                "the same command continues once this is fixed"
            ) from error

    def finish(self, device: torch.device, **facts: Any) -> dict[str, Any]:
        """Write `summary.json`, whole or not at all: `facts` first, then the pooled figures; return it."""
        batches = {line["batch"]["first"]: _batch_stats(line) for line in self.lines}
        pooled = pool(list(batches.values()))
        samples = len(self.lines)
        summary = facts | {
            "samples": samples,
            "mean_acceptance_length": _number(pooled.mean_acceptance_length),
            "accepted_by_depth": pooled.accepted_by_depth,
            "rounds": pooled.rounds,
            "decoded_tokens": pooled.decoded_tokens,
            "new_tokens": sum(line["new_tokens"] for line in self.lines),
            "tokens_per_second": _number(pooled.tokens_per_second),
            "decode_s": pooled.decode_s,
            "ttft_s": sum(line["ttft_s"] for line in self.lines) / samples if samples else None,
            "peak_memory_bytes": pooled.peak_memory_bytes,
            "device": device_name(device),
            "versions": versions(),
        }
        with self._reported():
            write_json(self.folder / SUMMARY_NAME, summary)
        return summary


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, whole or not at all. Raises OSError."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        unfinished.write_bytes(_encoded(content, indent=2) + b"\n")
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _encoded(content: dict[str, Any], indent: int | None = None) -> bytes:
    """JSON in UTF-8; a lone surrogate, which has no UTF-8, becomes its JSON escape."""
    return json.dumps(content, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


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
    found: dict[str, str | None] = {"python": platform.python_version(), "longspec": __version__}
    for package in ("torch", "transformers", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _sample_line(
    index: int, result: SampleResult, rounds: int, rows: int, first: int, stats: GenerationStats
) -> dict[str, Any]:
    return {
        "index": index,
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
        "batch": {
            "first": first,
            "rounds": stats.rounds,
            "decoded_tokens": stats.decoded_tokens,
            "accepted_by_depth": stats.accepted_by_depth,
            "peak_memory_bytes": stats.peak_memory_bytes or _resident_peak(),
        },
        "text": result.text,
        "token_ids": result.token_ids,
    }


def _without_answer(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("text", "token_ids")}


def _figures(raw: bytes, where: str) -> dict[str, Any]:
    """A complete line of `samples.jsonl` without its answer. Raises UserError that says `where` it is not one."""
    try:
        line = _without_answer(json.loads(raw))
        _batch_stats(line)
        return {name: line[name] for name in ("index", "new_tokens")} | line
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{where}: not a line of results; remove it, or all results with --overwrite") from error


def _batch_stats(line: dict[str, Any]) -> GenerationStats:
    """The figures of a line's whole batch, as `pool` takes them."""
    counts = {name: value for name, value in line["batch"].items() if name != "first"}
    return GenerationStats(**counts, ttft_s=line["ttft_s"], decode_s=line["decode_s"])


def _resident_peak() -> int:
    """Most bytes this process has held resident: the peak memory of a run on a CPU."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return None if math.isnan(value) else value


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
