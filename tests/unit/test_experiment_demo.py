"""The demo's errors and checks, and the end of the processes that an experiment starts."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from experiment_fixtures import make_chat_target

from experiments.demo import check, main
from experiments.processes import running
from experiments.training import launch
from longspec.errors import UserError

PASSED: dict[str, Any] = {
    "answers": {"vanilla": {"text": "same"}, "auto": {"text": "same"}},
    "comparison": {"prompts": 2, "methods": {"vanilla": {"equal_outputs": 2}, "auto": {"equal_outputs": 2}}},
    "fresh draft": {"prompts": 1, "methods": {"vanilla": {"equal_outputs": 1}, "tree": {"equal_outputs": 1}}},
    "losses": {"stage1": [9.0, 9.5, 8.0], "stage2": [8.0, 7.0]},
}
RANK = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, save)
print("started", flush=True)
time.sleep(60)
"""


def test_a_missing_draft_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # the command sets them for this whole process
    target = make_chat_target(tmp_path / "target")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([f"target={target}", f"root={tmp_path / 'out'}"])
    assert stop.value.code == 2 and not (tmp_path / "out").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "no trained draft" in line and "evaluation.draft=FOLDER" in line


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("answers", {"tree": {"text": "other"}}, "the two answers differ"),
        ("comparison", {"methods": {"auto": {"equal_outputs": 1}}}, "comparison: the output of auto is not vanilla's"),
        ("fresh draft", {"methods": {"tree": {"equal_outputs": 0}}}, "fresh draft: the output of tree"),
        ("losses", {"stage2": [7.0, 7.0]}, "stage2: the loss does not fall"),
        ("losses", {"stage2": [7.0, float("nan")]}, "stage2: the loss does not fall"),
    ],
)
def test_a_failed_check_is_one_line_that_names_it(part: str, change: dict[str, Any], message: str) -> None:
    check(PASSED)
    failed = copy.deepcopy(PASSED)
    failed[part] |= change
    with pytest.raises(UserError, match=message) as error:
        check(failed)
    assert "\n" not in str(error.value)


def test_a_launch_that_is_interrupted_may_save(tmp_path: Path) -> None:
    line = [sys.executable, "-c", RANK, str(tmp_path)]
    with pytest.raises(KeyboardInterrupt), running(line, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        raise KeyboardInterrupt
    assert child.poll() == 0 and (tmp_path / "saved").exists()


def test_a_launch_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "training" / "stage1"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("an earlier run\n")
    with pytest.raises(UserError, match=r"(?s)ended with code 3.*what went wrong"):
        launch([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], folder, steps=4)
    assert (folder / "log.txt").read_text().startswith("an earlier run\n")
