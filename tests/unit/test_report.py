"""The report: every verification pass weighs the same, lines are only appended, and JSON stays JSON."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch

from longspec.errors import UserError
from longspec.inference.stats import GenerationStats, pool
from longspec.jobs.results import Line, Results, part_path
from longspec.longbench.prompts import TaskPrompt
from longspec.longbench.report import read_line, sample_line, summarize, table
from longspec.longbench.run_folder import RUN_NAME, SAMPLES_NAME, SUMMARY_NAME, open_run, start_run

CPU = torch.device("cpu")
FACTS = {"method": "tree", "model": "tiny", "task": "lcc", "config": {"gamma": 4}}


def stats(
    rows: list[int], decoded: int, by_depth: list[int], seconds: float = 1.0, ttft: float = 0.5
) -> GenerationStats:
    """rows: the passes of each row."""
    return GenerationStats(sum(rows), rows, decoded, by_depth, ttft, seconds, peak_memory_bytes=sum(rows) * 100)


def result(name: str, tokens: int) -> tuple[TaskPrompt, list[int], str]:
    return TaskPrompt(name, [0] * 12), list(range(tokens)), "täxt\n"


def three_lines() -> list[Line]:
    """Two samples that were decoded together, and a third one."""
    first, second = stats([1], 4, [1, 1], 0.5, ttft=1.0), stats([3], 6, [2, 1], 1.5, ttft=1.0)
    lines = [sample_line(*result("a", 5), first, 0, rows=2), sample_line(*result("b", 7), second, 1, rows=2)]
    return [*lines, sample_line(*result("c", 3), stats([2], 2, [0, 0], 1.0, ttft=4.0), 2)]


def opened(folder: Path) -> Results:
    return Results(folder / SAMPLES_NAME, read_line)


def finish(results: Results) -> dict:
    results.put_in_order()
    return summarize(results.lines, 1, CPU, FACTS)


def lines_of(folder: Path) -> list[dict]:
    text = (folder / SAMPLES_NAME).read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def written(folder: Path) -> dict:
    """Write three lines; the summary."""
    report = opened(folder)
    for line in three_lines():
        report.add(line)
    return finish(report)


def test_summary_pools_samples_and_weighs_first_tokens_by_sample(tmp_path: Path) -> None:
    summary = written(tmp_path)
    assert summary["samples"] == 3 and summary["new_tokens"] == 15
    assert summary["mean_acceptance_length"] == pytest.approx(2.0)
    assert summary["accepted_by_depth"] == [3, 2]
    assert summary["tokens_per_second"] == pytest.approx(4.0) and summary["ttft_s"] == pytest.approx(2.0)
    assert summary["peak_memory_bytes"] == 300 and summary["config"] == {"gamma": 4}
    assert set(summary["versions"]) == {"python", "torch", "transformers", "triton", "longspec"}
    assert "acceptance length    2.000" in table(summary)


def test_a_line_has_its_samples_figures_with_null_instead_of_nan(tmp_path: Path) -> None:
    report = opened(tmp_path)
    report.add(sample_line(*result("a", 5), stats([2], 4, [1]), 0))
    report.add(sample_line(*result("b", 1), stats([0], 0, [0], seconds=0.0), 1))
    one, other = lines_of(tmp_path)
    assert (one["id"], one["prompt_tokens"], one["new_tokens"]) == ("a", 12, 5)
    assert (one["text"], one["token_ids"]) == ("täxt\n", [0, 1, 2, 3, 4])
    assert (one["acceptance_length"], one["rounds"], other["acceptance_length"]) == (2.0, 2, None)
    summary = summarize({1: report.lines[1]}, 1, CPU, FACTS)
    assert math.isnan(pool([]).mean_acceptance_length)
    assert summary["mean_acceptance_length"] is None and summary["tokens_per_second"] is None
    assert "acceptance length    -" in table(summary)


@pytest.mark.parametrize(("lines", "cut"), [(2, 0), (2, 9), (1, 0), (1, 9), (0, 9)])
def test_a_cut_report_continues_after_its_last_complete_line(tmp_path: Path, lines: int, cut: int) -> None:
    """`cut` bytes of the next line are on disk. Reading changes nothing, and a new line is written at once."""
    summary, path = written(tmp_path), tmp_path / SAMPLES_NAME
    whole = path.read_bytes().splitlines(keepends=True)
    left = b"".join(whole)[: len(b"".join(whole[:lines])) + cut]
    path.write_bytes(left)
    report = opened(tmp_path)
    assert report.done == set(range(lines)) and path.read_bytes() == left
    report.start()
    for number, line in enumerate(three_lines()[lines:], lines + 1):
        report.add(line)
        assert path.read_bytes() == b"".join(whole[:number])
    assert finish(report) == summary == finish(opened(tmp_path))


def test_parts_are_collected_once(tmp_path: Path) -> None:
    """A part may hold lines that a killed process has already collected, and an incomplete last line."""
    summary, path = written(tmp_path), tmp_path / SAMPLES_NAME
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(third)
    (tmp_path / f"{SAMPLES_NAME}.rank-1").write_bytes(third + first + second[:9])
    (tmp_path / f"{SAMPLES_NAME}.rank-12").write_bytes(second)
    assert opened(tmp_path).done == {0, 1, 2}
    assert finish(opened(tmp_path)) == summary
    assert path.read_bytes() == first + second + third
    assert sorted(file.name for file in tmp_path.iterdir()) == [SAMPLES_NAME]


def test_a_rank_that_outlives_its_run_adds_nothing_to_a_later_one(tmp_path: Path) -> None:
    path, (old, new, _) = tmp_path / SAMPLES_NAME, three_lines()
    earlier = Results(path, read_line, rank=1)
    earlier.start()
    first, other = Results(path, read_line, overwrite=True), Results(path, read_line, rank=1)
    first.start()
    other.start()
    earlier.add(old)
    other.add(new)
    first.put_in_order()
    assert [line["index"] for line in lines_of(tmp_path)] == [1]


def test_earlier_results_go_only_if_told_and_only_for_a_new_one(tmp_path: Path) -> None:
    """With the summary and the parts of the earlier run, and before the new configuration is stored."""
    written(tmp_path)
    before = (tmp_path / SAMPLES_NAME).read_bytes()
    earlier = [tmp_path / SUMMARY_NAME, part_path(tmp_path / SAMPLES_NAME, 1)]
    for path in earlier:
        path.touch()
    record = {"run": {"seed": 1}}
    with open_run(tmp_path, record, overwrite=True) as report:
        assert report.done == set() and (tmp_path / SAMPLES_NAME).read_bytes() == before
        assert all(path.exists() for path in earlier) and not (tmp_path / RUN_NAME).exists()
        start_run(report, record)
        report.add(three_lines()[0])
    assert [line["id"] for line in lines_of(tmp_path)] == ["a"] and not any(path.exists() for path in earlier)
    assert json.loads((tmp_path / RUN_NAME).read_text()) == record


@pytest.mark.parametrize("line", ["{", "7", "{}", '{"index": 0, "batch": {}}', "\0\0\0"])
def test_a_complete_line_of_something_else_is_refused(tmp_path: Path, line: str) -> None:
    written(tmp_path)
    with (tmp_path / SAMPLES_NAME).open("a") as handle:
        handle.write(line + "\n")
    with pytest.raises(UserError, match=r"samples\.jsonl, line 4: not a line of results"):
        opened(tmp_path)


def test_a_full_disk_leaves_the_lines_that_are_there(tmp_path: Path) -> None:
    """A limit on the size of files stands in for it: part of the next line fits."""
    report = opened(tmp_path)
    report.add(sample_line(*result("a", 5), stats([2], 4, [1]), 0))
    before = (tmp_path / SAMPLES_NAME).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(UserError, match="1 results are saved; the same command continues"):
            report.add(sample_line(*result("b", 5), stats([2], 4, [1]), 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    report = opened(tmp_path)
    assert report.done == {0}
    report.start()
    assert (tmp_path / SAMPLES_NAME).read_bytes() == before
    report.add(sample_line(*result("b", 5), stats([2], 4, [1]), 1))
    assert [line["id"] for line in lines_of(tmp_path)] == ["a", "b"]
