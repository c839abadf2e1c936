"""The comparison of engines: equal prompts, rows for what ran and for what failed, and skipped engines by name."""

import os
import select
from pathlib import Path

import pytest

from benchmarks import engine_runs, engines


def run_of(**changes: object) -> engine_runs.Run:
    prompts = {"chat": [[1, 2], [3]], "4k": [[4, 5, 6]]}
    settings = dict(engine="ours", method="vanilla", setting="defaults", target="t", draft=None, prompts=prompts)
    return engine_runs.Run(**(settings | dict(concurrent=[3], tokens=5, dtype="float32") | changes))  # type: ignore[arg-type]


def script(folder: Path, commands: str) -> Path:
    """An interpreter that runs these commands instead of a module."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{commands}\n")
    python.chmod(0o755)
    return python


def test_decoding_excludes_the_prompt_and_concurrent_prompts_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which a prompt takes 10 s per token and each new token 1 s."""
    now = [0.0]
    batches = []

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        now[0] += 10 * sum(map(len, prompts)) + tokens
        batches.append(prompts)
        return [[prompt[0]] * tokens for prompt in prompts]

    monkeypatch.setattr(engine_runs, "perf_counter", lambda: now[0])
    result = engine_runs.measure(run_of(), generate)
    assert result["single"] == {"chat": 1.0, "4k": 1.0}
    assert batches[-1] == [[1, 2], [3], [1, 2]] and result["concurrent"] == {"3": 15 / 55}
    assert [answer[0] for answer in result["answers"]] == [1, 3, 4, 1, 3, 1]
    # An engine that drafts from earlier answers has not answered a prompt before it counts.
    assert batches[:4] == [[[2, 1]], [[2, 1]], [[3]], [[3]]]


def test_the_table_counts_answers_equal_to_vanilla_and_names_failures() -> None:
    result = {"single": {"chat": 1234.4}, "concurrent": {"8": 5.0}}
    names = {"engine": "sglang", "setting": "defaults"}
    rows = [
        {"method": "vanilla", "answers": [[1], [2]]} | names | result,
        {"method": "glide", "answers": [[1], [3]]} | names | result,
        {"method": "ngram", "error": "out of memory"} | names,
    ]
    engines.count_same(rows)
    text = engines.table(rows, ["chat"], [8]).splitlines()
    assert text[3] == "| sglang | glide | defaults | 1,234 | 5 | 1/2 |"
    assert text[4] == "| sglang | ngram | defaults | failed: out of memory |  |  |"


def test_the_processes_of_an_engine_end_with_its_run(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    python = script(tmp_path, f"sleep 1000 < /dev/null > {pipe} 2>&1 &\necho '{{\"single\": 1}}'")
    assert engines.run_alone(run_of(), str(python), limit=60) == {"single": 1}
    # The end of the file is read once no process has the pipe open for writing.
    assert select.select([reader], [], [], 20)[0] and os.read(reader, 1) == b""
    os.close(reader)
