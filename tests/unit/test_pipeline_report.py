"""The summary of a report, and the last line of the command."""

import pandas
import pytest

from longspec.pipeline.report import LEAST_OUTPUTS, MAIN_METHODS, main_table, main_tasks
from longspec.pipeline.run import verdict
from longspec.pipeline.samples import Samples

SPEEDS = {"vanilla": 10, "lookup": 15, "tree": 20, "auto": 30}


def samples(outputs: dict[str, int], looping: dict[str, int]) -> Samples:
    """Greedy samples of every main method: numbers of outputs without and with loops by task."""
    rows = []
    for method in MAIN_METHODS:
        for task in outputs:
            for number in range(outputs[task] + looping[task]):
                loops = number >= outputs[task]
                row = {"task": task, "context": 0, "method": method, "temperature": 0.0, "seed": 0, "id": str(number)}
                seconds = (0.1 if loops else 1.0) * 60 / SPEEDS[method]
                rows.append(row | {"loops": loops, "rounds": 20, "decoded_tokens": 60, "decode_s": seconds})
    return Samples(pandas.DataFrame(rows))


def test_tasks_with_few_outputs_count_only_in_the_last_row() -> None:
    measured = samples({"lcc": LEAST_OUTPUTS, "edit": LEAST_OUTPUTS - 1}, {"lcc": 0, "edit": 3})
    assert main_tasks(measured) == ["lcc"]
    lcc, everything = main_table(measured).to_dict("records")
    assert (lcc["task"], everything["task"]) == ("lcc", "all")
    for row in (lcc, everything):
        assert row["tokens per round, tree"].startswith("3.00")
        assert row["tokens/s, auto"].startswith("30") and row["tokens/s, vanilla"].startswith("10")
        assert row["auto over vanilla"].startswith("3.00") and row["auto over lookup"].startswith("2.00")


def test_a_draft_slower_than_lookup_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    good = verdict(samples({"lcc": 6}, {"lcc": 0}))
    assert "3.00 ± 0.00 tokens per round" in good and "1.33 ± 0.00 x as fast as prompt lookup" in good
    monkeypatch.setitem(SPEEDS, "tree", 12)
    bad = verdict(samples({"lcc": 6}, {"lcc": 0}))
    assert bad.startswith("The draft is slower than prompt lookup") and "0.80 ± 0.00 x" in bad and "--text" in bad
