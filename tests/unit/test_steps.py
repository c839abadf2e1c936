"""The chain of steps: done once, and again exactly when something before it has changed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.pipeline.steps import Steps


@dataclass
class Setting:
    value: int


class Chain:
    """Two steps that note their runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ran: list[str] = []

    def go(self, first: int, second: int, broken: bool = False) -> list[str]:
        self.ran = []
        steps = Steps(self.root)
        folder = steps.run("first", Setting(first), lambda folder: self.work(folder, first))
        assert (folder / "result").read_text() == str(first)
        steps.run("second", Setting(second), lambda folder: self.work(folder, second, broken))
        return self.ran

    def work(self, folder: Path, value: int, broken: bool = False) -> None:
        self.ran.append(folder.name)
        assert not list(folder.iterdir()), "an earlier run's files are still there"
        (folder / "result").write_text(str(value))
        if broken:
            raise RuntimeError("broken")


def test_a_second_call_does_nothing(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    assert chain.go(1, 2) == ["first", "second"]
    assert chain.go(1, 2) == []


def test_a_change_runs_its_step_and_those_behind_it(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.go(1, 2)
    assert chain.go(1, 3) == ["second"]
    assert chain.go(5, 3) == ["first", "second"]


def test_a_step_that_broke_off_is_run_again(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    with pytest.raises(RuntimeError):
        chain.go(1, 2, broken=True)
    assert chain.go(1, 2) == ["second"]


def test_a_step_made_anew_makes_those_behind_it_stale(tmp_path: Path) -> None:
    """Training does not give the same weights twice, so a result from the old ones is no longer true."""
    chain = Chain(tmp_path)
    chain.go(1, 2)
    (tmp_path / "first" / "done.json").unlink()
    assert chain.go(1, 2) == ["first", "second"]


def test_a_step_that_can_go_on_finds_what_it_left_unless_its_settings_have_changed(tmp_path: Path) -> None:
    found = []

    def work(folder: Path) -> None:
        found.append(sorted(path.name for path in folder.glob("*.part")))
        (folder / f"{len(found)}.part").touch()
        if len(found) < 4:
            raise KeyboardInterrupt

    for value in (1, 1, 2):
        with pytest.raises(KeyboardInterrupt):
            Steps(tmp_path).run("long", Setting(value), work, resumable=True)
    Steps(tmp_path).run("long", Setting(2), work, resumable=True)
    Steps(tmp_path).run("long", Setting(2), work, resumable=True)
    assert found == [[], ["1.part"], [], ["3.part"]]


def test_branches_depend_on_what_is_before_them_and_not_on_one_another(tmp_path: Path) -> None:
    def go(trunk: int, left: int, right: int) -> list[str]:
        ran: list[str] = []
        steps = Steps(tmp_path)
        steps.run("trunk", Setting(trunk), lambda folder: ran.append("trunk"))
        steps.branch().run("left", Setting(left), lambda folder: ran.append("left"))
        steps.branch().run("right", Setting(right), lambda folder: ran.append("right"))
        return ran

    assert go(1, 1, 1) == ["trunk", "left", "right"]
    assert go(1, 1, 1) == []
    assert go(1, 1, 2) == ["right"]
    assert go(1, 2, 2) == ["left"]
    assert go(2, 2, 2) == ["trunk", "left", "right"]
