"""Rotation of checkpoints. A crash at any point of a save leaves a complete pair, and the newest one is used."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from longspec.errors import UserError
from longspec.train import generations
from longspec.train.generations import BEST, DRAFTS, STATES, complete_saves, find_draft, find_latest
from longspec.train.markers import MARKER, Marker, Run, is_whole, write_marker

DRAFT_FILE = "draft_model_weights.pth"
ANY_RUN = Run()


def marker(step: int, run: Run = ANY_RUN) -> Marker:
    return Marker(step, world_size=2, run=run)


def write(folder: Path, step: int, whole: bool = True, run: Run = ANY_RUN) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "content").write_text(str(step))
    if folder.name in (*DRAFTS, *BEST):
        (folder / DRAFT_FILE).write_text(str(step))
    if whole:
        write_marker(folder, marker(step, run))


def write_pairs(output: Path, *steps: int | None, run: Run = ANY_RUN) -> None:
    """Write the state and the draft of each generation: staged, newest and second newest. None writes nothing."""
    for number, step in enumerate(steps):
        for names in (STATES, DRAFTS):
            if step is not None:
                write(output / names[number], step, run=run)


def latest(output: Path) -> tuple[str, int] | None:
    """Name and step of the newest state."""
    found = find_latest(output)
    return found and (found[0].name, found[1].step)


def step_of(folder: Path) -> int:
    assert is_whole(folder)
    return int((folder / "sub" / "content").read_text())


def whole_folders(output: Path) -> list[tuple[str, int]]:
    return sorted((folder.name, step_of(folder)) for folder in output.iterdir())


def contents(output: Path) -> dict[str, bytes | None]:
    """Every file and folder in `output`."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(output.rglob("*"))}


class Crash(Exception):
    """The death of a process."""


def crash_at(act: int, changes: int, output: Path) -> None:
    """Complete the saves, which takes `changes` changes of the file system, and crash before change `act`, if there is
    one, or halfway through the removal of a folder."""
    acts = iter(range(1000))

    def wrapped(change, before):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(acts) == act:
                before(*args)
                raise Crash
            return change(*args, **kwargs)

        return run

    rmtree = shutil.rmtree
    with pytest.MonkeyPatch.context() as dying, pytest.raises(Crash) if act < changes else nullcontext():
        dying.setattr(Path, "rename", wrapped(Path.rename, lambda *_: None))
        dying.setattr(generations.shutil, "rmtree", wrapped(rmtree, lambda folder: rmtree(folder / "sub")))
        complete_saves(output)


@pytest.mark.parametrize("act", range(9))
def test_a_crash_in_rotation_loses_nothing(act: int, tmp_path: Path) -> None:
    """There are 8 changes: 2 removals and 2 renames for each of the two kinds of folder."""
    write_pairs(tmp_path, 3, 2, 1)
    crash_at(act, 8, tmp_path)
    for names in (STATES, DRAFTS):
        assert any(is_whole(tmp_path / name) and step_of(tmp_path / name) >= 2 for name in names)
    before = contents(tmp_path)
    assert latest(tmp_path) in [(name, 3) for name in STATES[:2]]
    assert contents(tmp_path) == before, "looking changes nothing"
    complete_saves(tmp_path)
    assert latest(tmp_path) == ("last_ds", 3)
    assert step_of(tmp_path / "checkpoint-last") == 3
    assert not (tmp_path / STATES[0]).exists() and not (tmp_path / DRAFTS[0]).exists()
    assert all(step == 2 for name, step in whole_folders(tmp_path) if "2" in name)


@pytest.mark.parametrize("act", range(4))
def test_a_crash_in_keeping_the_best_loses_nothing(act: int, tmp_path: Path) -> None:
    """There are 3 changes: 2 to remove the previous one and 1 rename. An incomplete draft never replaces it."""
    staged, best = (tmp_path / name for name in BEST)
    write(best, 1)
    write(staged, 2)
    crash_at(act, 3, tmp_path)
    complete_saves(tmp_path)
    assert whole_folders(tmp_path) == [("checkpoint-best", 2)]
    write(staged, 3, whole=False)
    complete_saves(tmp_path)
    assert whole_folders(tmp_path) == [("checkpoint-best", 2)]


@pytest.mark.parametrize("damage", [lambda state: write(state, 4, whole=False), lambda state: state.symlink_to("gone")])
def test_a_damaged_newest_never_pushes_out_the_whole_older_one(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """If all states are damaged or on a disk that is not mounted, the run must not start as in an empty folder."""
    assert find_latest(tmp_path) is None and find_latest(tmp_path / "absent") is None
    damage(tmp_path / "last_ds")
    with pytest.raises(UserError, match="last_ds was not saved whole"):
        find_latest(tmp_path)
    write(tmp_path / "last_2ds", 2)
    assert latest(tmp_path) == ("last_2ds", 2)
    write_pairs(tmp_path, 3)
    complete_saves(tmp_path)
    assert [step_of(tmp_path / name) for name in ("last_ds", "last_2ds")] == [3, 2]


DAMAGES = {
    "truncated": (lambda file: file.write_text("4" * 3), "content is not the file that was saved"),
    "foreign": (lambda file: file.write_text("5555"), "content is not the file that was saved"),
    "gone": (Path.unlink, "content cannot be read"),
    "pipe": (lambda file: (file.unlink(), os.mkfifo(file)), "content cannot be read"),
    "marker": (lambda file: (file.parents[1] / MARKER).write_text('{"step": '), f"{MARKER} is not a valid marker"),
    "no step": (lambda file: rename(file, '"step"', '"stop"'), f"{MARKER} is not a valid marker"),
    "stray": (lambda file: (file.parent / "zero_optim_states.pt").touch(), "zero_optim_states.pt is not the file"),
}


def rename(file: Path, one: str, other: str) -> None:
    """Change text in a marker."""
    marker = file.parents[1] / MARKER
    marker.write_text(marker.read_text().replace(one, other))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume from the older state replaces the damaged one, not the newer draft. Two damaged ones are both named."""
    damage, said = DAMAGES[kind]
    write_pairs(tmp_path, None, 4444, 3333, run=Run("run"))
    damage(tmp_path / "last_ds" / "sub" / "content")
    assert latest(tmp_path) == ("last_2ds", 3333)
    assert said in caplog.text and "older checkpoint" in caplog.text
    write_pairs(tmp_path, 4444, run=Run("run"))
    complete_saves(tmp_path)
    assert [step_of(tmp_path / name) for names in (STATES, DRAFTS) for name in names[1:]] == [4444, 3333] * 2
    assert step_of(tmp_path / "checkpoint-earlier-1") == 4444
    for name in STATES[1:]:
        (tmp_path / name / "sub" / "content").write_text("?")
    with pytest.raises(UserError, match=r"last_ds/sub/content is not.*last_2ds/sub/content is not"):
        find_latest(tmp_path)


def save_twice(output: Path, first: int, run: Run, overwrite: bool = False) -> None:
    """Save a draft with its state twice, as one launch."""
    for step in (first, first + 1):
        write_pairs(output, step, run=run)
        complete_saves(output, overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_rotation_never_pushes_out_the_draft_of_an_earlier_run(overwrite: bool, tmp_path: Path) -> None:
    """The last drafts and the best one are removed only if the user allowed it, and only after the new run's save."""
    save_twice(tmp_path, 19, Run("old"))
    write(tmp_path / BEST[1], 12, run=Run("old"))
    shutil.rmtree(tmp_path / "last_ds")
    shutil.rmtree(tmp_path / "last_2ds")
    before = contents(tmp_path)
    write(tmp_path / STATES[0], 1, run=Run("new"))
    write(tmp_path / DRAFTS[0], 1, whole=False)
    complete_saves(tmp_path, overwrite)
    assert contents(tmp_path) == before, "an unfinished save touches no draft"
    save_twice(tmp_path, 1, Run("new"), overwrite)
    assert (tmp_path / BEST[1]).exists() is not overwrite
    write(tmp_path / BEST[0], 1, run=Run("new"))
    complete_saves(tmp_path, overwrite)
    earlier = [("checkpoint-earlier-1", 19), ("checkpoint-earlier-2", 20), ("checkpoint-earlier-3", 12)]
    new = [("checkpoint-2last", 1), ("checkpoint-best", 1), ("checkpoint-last", 2), ("last_2ds", 1), ("last_ds", 2)]
    assert whole_folders(tmp_path) == sorted(new if overwrite else [*new, *earlier])


def test_a_linked_generation_rotates_and_what_it_links_to_stays(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    write_pairs(tmp_path, None, 4)
    for names in (STATES, DRAFTS):
        (output / names[1]).symlink_to(tmp_path / names[1])
    assert latest(output) == ("last_ds", 4)
    save_twice(output, 5, ANY_RUN)
    assert [step for _, step in whole_folders(output)] == [5, 6, 5, 6]
    assert step_of(tmp_path / "last_ds") == 4


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_draft_without_its_marker_is_kept_unless_the_user_said_so(overwrite: bool, tmp_path: Path) -> None:
    """A user may copy only the weights into a folder of that name."""
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / "checkpoint-last" / DRAFT_FILE).write_text("copied")
    save_twice(tmp_path, 1, Run("new"), overwrite)
    kept = tmp_path / "checkpoint-earlier-1" / DRAFT_FILE
    assert kept.exists() is not overwrite and step_of(tmp_path / "checkpoint-last") == 2


def test_any_complete_draft_is_found_and_the_newest_whole_one_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def newest() -> tuple[str, int]:
        folder, found = find_draft(tmp_path)  # type: ignore[misc]
        return folder.name, found.step

    assert find_draft(tmp_path) is None
    for number, step in ((2, 7), (10, 8)):
        write(tmp_path / f"checkpoint-earlier-{number}", step)
    assert newest() == ("checkpoint-earlier-10", 8)
    for name, step in ((BEST[1], 9), (DRAFTS[2], 10), (DRAFTS[1], 11)):
        write(tmp_path / name, step)
        assert newest() == (name, step)
    (tmp_path / DRAFTS[1] / "sub" / "content").write_text("??")
    assert not caplog.text
    assert newest() == (DRAFTS[2], 10)
    assert "checkpoint-last/sub/content is not the file that was saved" in caplog.text
