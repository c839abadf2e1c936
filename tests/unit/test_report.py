"""The report: every verification pass weighs the same, files are whole, and JSON stays JSON."""

import json
import math
from pathlib import Path

import pytest
import torch

from longspec.inference.generate import GenerationStats
from longspec.inference.report import SAMPLES_NAME, SUMMARY_NAME, Report, SampleResult, pool, table

CPU = torch.device("cpu")
FACTS = {"method": "tree", "model": "tiny", "task": "lcc", "config": {"gamma": 4}}


def stats(
    rows: list[int], decoded: int, by_depth: list[int], seconds: float = 1.0, ttft: float = 0.5
) -> GenerationStats:
    """rows: the passes of each row."""
    return GenerationStats(sum(rows), rows, decoded, by_depth, ttft, seconds, peak_memory_bytes=sum(rows) * 100)


def result(name: str, tokens: int) -> SampleResult:
    return SampleResult(name, 12, list(range(tokens)), "täxt\n")


def refuse_nan(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def lines_of(folder: Path) -> list[dict]:
    text = (folder / SAMPLES_NAME).read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse_nan) for line in text.splitlines()]


def test_acceptance_is_pooled_over_passes_not_averaged_over_samples() -> None:
    """10 tokens in 10 passes and 30 in 6 make 40/16 = 2.5; the mean of the samples' own would be 3."""
    pooled = pool([stats([10], 10, [0, 0], 4.0), stats([6], 30, [6, 5, 4], 1.0)])
    assert pooled.mean_acceptance_length == pytest.approx(2.5)
    assert pooled.accepted_by_depth == [6, 5, 4]
    assert pooled.tokens_per_second == pytest.approx(8.0)
    assert pooled.peak_memory_bytes == 1000


def test_summary_pools_batches_and_weighs_first_tokens_by_sample(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.add([result("a", 5), result("b", 7)], stats([1, 3], 10, [3, 2], 2.0, ttft=1.0))
    report.add([result("c", 3)], stats([2], 2, [0, 0], 1.0, ttft=4.0))
    summary = report.finish(CPU, **FACTS)
    assert json.loads((tmp_path / SUMMARY_NAME).read_text()) == summary
    assert summary["samples"] == 3 and summary["new_tokens"] == 15
    assert summary["mean_acceptance_length"] == pytest.approx(2.0)
    assert summary["accepted_by_depth"] == [3, 2]
    assert summary["tokens_per_second"] == pytest.approx(4.0)
    assert summary["ttft_s"] == pytest.approx(2.0)
    assert summary["peak_memory_bytes"] == 400
    assert summary["config"] == {"gamma": 4}
    assert set(summary["versions"]) == {"python", "torch", "transformers", "triton", "longspec"}
    assert "acceptance length    2.000" in table(summary)


def test_a_line_is_on_disk_as_soon_as_its_sample_is_finished(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.add([result("a", 5)], stats([2], 4, [1]))
    (line,) = lines_of(tmp_path)
    assert (line["id"], line["prompt_tokens"], line["new_tokens"]) == ("a", 12, 5)
    assert (line["text"], line["token_ids"]) == ("täxt\n", [0, 1, 2, 3, 4])
    assert (line["acceptance_length"], line["rounds"]) == (2.0, 2)
    assert not (tmp_path / SUMMARY_NAME).exists()
    report.add([result("b", 1)], stats([0], 0, [0]))
    assert [line["id"] for line in lines_of(tmp_path)] == ["a", "b"]


def test_a_run_without_passes_has_null_instead_of_nan(tmp_path: Path) -> None:
    report = Report(tmp_path)
    report.add([result("a", 1)], stats([0], 0, [0], seconds=0.0))
    summary = report.finish(CPU, **FACTS)
    assert math.isnan(pool(report.batches).mean_acceptance_length)
    assert summary["mean_acceptance_length"] is None and summary["tokens_per_second"] is None
    assert lines_of(tmp_path)[0]["acceptance_length"] is None
    assert "acceptance length    -" in table(summary)


def test_a_new_run_replaces_what_an_earlier_one_left(tmp_path: Path) -> None:
    """Old lines must not mix with new ones, nor an old summary stand beside an unfinished run."""
    earlier = Report(tmp_path)
    earlier.add([result("old", 1)], stats([0], 0, [0]))
    earlier.finish(CPU, **FACTS)
    Report(tmp_path)
    assert lines_of(tmp_path) == []
    assert not (tmp_path / SUMMARY_NAME).exists()
