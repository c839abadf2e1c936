"""The results of a run on disk: a JSON line per sample, and a summary that pools them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longspec.errors import UserError
from longspec.inference.device import device_name, versions
from longspec.inference.stats import GenerationStats, pool
from longspec.longbench.sample_lines import (
    SampleResult,
    batch_stats,
    number_or_none,
    parse_line,
    sample_line,
    without_answer,
)
from longspec.parts import all_parts, complete_lines, part_paths, write_in_order
from longspec.replacing import replacing

RUN_NAME = "run.json"
SAMPLES_NAME = "samples.jsonl"
SUMMARY_NAME = "summary.json"


class Report:
    """The results in a run's folder: one line per sample, appended batch by batch, and finally a summary.

    It starts with the complete lines that an interrupted run left. An incomplete last line does not count; its sample
    runs again. With `resume=False` it starts empty, and the first `add` removes the earlier results.

    In a run of several ranks, rank 0 writes `samples.jsonl`. Each other rank has a report of its own on a part file,
    whose lines rank 0 collects. The lines are in the order of samples once all samples have one.
    """

    def __init__(
        self,
        folder: str | Path,
        resume: bool = True,
        record: dict[str, Any] | None = None,
        name: str = SAMPLES_NAME,
        done: Iterable[int] = (),
    ) -> None:
        """Read the folder, without changing it. Raises UserError for complete lines that are not a report's.

        record: the run's configuration. The first `add` stores it and removes everything that does not belong to it.
        Until then the folder does not change, so a run without any result leaves the earlier results unchanged.
        None stores nothing and removes nothing. name: of the file of lines. done: indices of the samples that have a
        line in another file.
        """
        self.folder = Path(folder)
        self.path = self.folder / name
        self.resume = resume
        self.record = record
        """The configuration that is still to be stored."""
        self.lines: list[dict[str, Any]] = []
        """The lines on disk, without texts and token ids."""
        self.done = set(done)
        """Indices of the samples that have a line."""
        self.size = 0
        """Number of bytes in the complete lines on disk."""
        self.processes = 1
        """Number of ranks of the largest launch that wrote results of this run."""
        if resume and self.path.exists():
            self._read()

    def _read(self) -> None:
        with self.path.open("rb") as handle:
            for number, raw in enumerate(complete_lines(handle), 1):
                self._note(parse_line(raw, f"{self.path}, line {number}"))
                self.size += len(raw)

    def _note(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self.done.add(line["index"])

    def add(self, results: Sequence[SampleResult], stats: GenerationStats, first: int) -> None:
        """Append a line for each row of a batch. Its first row is sample `first` of the run; times are the batch's.

        Rows that have a line already are skipped: a batch that was interrupted while it was written runs again as a
        whole, because the seed belongs to the batch. Raises UserError if the lines cannot be written; the earlier ones
        stay intact.
        """
        lines = []
        # Times and memory belong to the batch, counts to the row.
        for index, (result, rounds) in enumerate(zip(results, stats.row_rounds, strict=True), first):
            if index not in self.done:
                lines.append(sample_line(index, result, rounds, len(results), first, stats))
        content = b"".join(_encoded(line) + b"\n" for line in lines)
        with self._writing():
            self._store_record()
            self._append(content)
        for line in lines:
            self._note(without_answer(line))

    def start(self, processes: int) -> None:
        """Store the run's configuration before the first `add`, because other ranks write parts. Raises UserError."""
        self.processes = max(self.processes, processes)
        if self.record is not None:
            self.record["processes"] = self.processes
        # A rank that dies before rank 0 has a result must not leave parts of an unknown run.
        if processes > 1:
            with self._writing():
                self._store_record()

    def collect(self, wait: bool = False) -> None:
        """Append the lines in the part files of other ranks, and remove these files.

        A line that is here already was collected by a process that was killed before it removed the file. wait: for
        ranks that have not closed their files yet. Raises UserError if a rank still writes to its file, for lines that
        are not a report's, and if the lines cannot be written.
        """
        with all_parts(self.path, wait) as parts:
            for part in parts:
                lines = {}
                for number, raw in enumerate(complete_lines(part), 1):
                    line = parse_line(raw, f"{part.name}, line {number}")
                    if line["index"] not in self.done:
                        lines[raw] = line
                with self._writing():
                    self._store_record()
                    self._append(b"".join(lines))
                    # After the append: a crash in between leaves lines twice, and the next run skips them.
                    Path(part.name).unlink()
                for line in lines.values():
                    self._note(line)

    def _store_record(self) -> None:
        """Store the run's configuration, once, and remove results that do not belong to it. Raises OSError."""
        if self.record is None:
            return
        if not self.resume:
            for path in (self.folder / SUMMARY_NAME, self.path, *part_paths(self.path)):
                path.unlink(missing_ok=True)
        if self.path.exists():
            # Cuts the incomplete last line, so that the next one starts on a line of its own.
            os.truncate(self.path, self.size)
        write_json(self.folder / RUN_NAME, self.record)
        self.record = None

    def _append(self, content: bytes) -> None:
        """Append whole lines or nothing. Raises OSError."""
        with self.path.open("ab", buffering=0) as handle:
            try:
                # An unbuffered write may take only part of the bytes.
                rest = memoryview(content)
                while rest:
                    rest = rest[handle.write(rest) :]
                os.fsync(handle.fileno())
            except OSError:
                # Half a batch would count as done when the run continues.
                handle.truncate(self.size)
                raise
        self.size += len(content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.folder}: cannot be written ({error.strerror}); {len(self.lines)} samples are saved; "
                "the same command continues once this is fixed"
            ) from error

    def finish(self, device: torch.device, **facts: Any) -> dict[str, Any]:
        """Put the lines in order, write `summary.json` atomically and return it: `facts`, then the pooled figures."""
        # Ranks finish in any order, but results do not depend on the number of ranks.
        order = [line["index"] for line in self.lines]
        if order != sorted(order):
            with self._writing():
                write_in_order(self.path, order)
            self.lines.sort(key=lambda line: line["index"])
        # The rows of a batch share its figures, so each batch counts once.
        batches = {line["batch"]["first"]: batch_stats(line) for line in self.lines}
        pooled = pool(list(batches.values()))
        samples = len(self.lines)
        summary = facts | {
            "samples": samples,
            "processes": self.processes,
            "mean_acceptance_length": number_or_none(pooled.mean_acceptance_length),
            "accepted_by_depth": pooled.accepted_by_depth,
            "rounds": pooled.rounds,
            "decoded_tokens": pooled.decoded_tokens,
            "new_tokens": sum(line["new_tokens"] for line in self.lines),
            "tokens_per_second": number_or_none(pooled.tokens_per_second),
            "decode_s": pooled.decode_s,
            "ttft_s": sum(line["ttft_s"] for line in self.lines) / samples if samples else None,
            "peak_memory_bytes": pooled.peak_memory_bytes,
            "device": device_name(device),
            "versions": versions(),
        }
        with self._writing():
            write_json(self.folder / SUMMARY_NAME, summary)
        return summary


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` atomically. Raises OSError."""
    with replacing(path) as unfinished:
        unfinished.write_bytes(_encoded(content, indent=2) + b"\n")


def _encoded(content: dict[str, Any], indent: int | None = None) -> bytes:
    """JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(content, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


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
