"""Rotation of checkpoints. A crash at any point of a save leaves a complete pair, and the newest one is used."""

import errno
import math
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from training_fixtures import ROOT

from longspec.errors import UserError
from longspec.train import generations
from longspec.train.checkpoint import locate, read_best, read_draft, save_checkpoint
from longspec.train.config import CONFIG_NAME, compose_config, to_yaml, typed
from longspec.train.config_schema import TrainConfig
from longspec.train.generations import BEST, DRAFTS, STATES, complete_saves, find_draft, find_latest
from longspec.train.markers import MARKER, Contents, Marker, Run, is_whole, write_marker
from longspec.train.resume import check_same_run

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


def crash_at(act: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash before the `act`-th change of the file system, or halfway through the removal of a folder."""
    acts = iter(range(1000))

    def wrapped(change, before):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(acts) == act:
                before(*args)
                raise Crash
            return change(*args, **kwargs)

        return run

    monkeypatch.setattr(Path, "rename", wrapped(Path.rename, lambda *_: None))
    rmtree = shutil.rmtree
    monkeypatch.setattr(generations.shutil, "rmtree", wrapped(rmtree, lambda folder: rmtree(folder / "sub")))


@pytest.mark.parametrize("act", range(9))
def test_a_crash_in_rotation_loses_nothing(act: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 8 changes: 2 removals and 2 renames for each of the two kinds of folder."""
    write_pairs(tmp_path, 3, 2, 1)
    with monkeypatch.context() as dying:
        crash_at(act, dying)
        if act < 8:
            with pytest.raises(Crash):
                complete_saves(tmp_path)
        else:
            complete_saves(tmp_path)
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
def test_a_crash_in_keeping_the_best_loses_nothing(act: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 3 changes: 2 to remove the previous one and 1 rename. An incomplete draft never replaces it."""
    staged, best = (tmp_path / name for name in BEST)
    write(best, 1)
    write(staged, 2)
    with monkeypatch.context() as dying:
        crash_at(act, dying)
        if act < 3:
            with pytest.raises(Crash):
                complete_saves(tmp_path)
    complete_saves(tmp_path)
    assert whole_folders(tmp_path) == [("checkpoint-best", 2)]
    write(staged, 3, whole=False)
    complete_saves(tmp_path)
    assert whole_folders(tmp_path) == [("checkpoint-best", 2)]


def test_the_best_so_far_is_read_back_unless_it_cannot_be_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is -inf if the draft is damaged or was the best on other rows, so that the next evaluation replaces
    it."""
    config = stored_config(output_dir=str(tmp_path))
    run = Run("one", contents=Contents(held_out=[["here", "abc"]]))
    assert read_best(config, run) == -math.inf and not caplog.text
    best = tmp_path / BEST[1]
    best.mkdir()
    (best / CONFIG_NAME).write_text(to_yaml(config))
    (best / "evaluation.json").write_text('{"step": 4, "eval_acceptance_length": 2.5}')
    write_marker(best, marker(4, run))
    assert read_best(config, replace(run, contents=Contents(held_out=[["moved", "abc"]]))) == 2.5 and not caplog.text
    fewer_rows = stored_config(output_dir=str(tmp_path), **{"evaluation.rows": "3"})
    for other, own in ((config, replace(run, contents=Contents())), (fewer_rows, run)):
        assert read_best(other, own) == -math.inf and "other held-out rows" in caplog.text
        caplog.clear()
    assert read_best(config, Run("another")) == -math.inf and "is of another run" in caplog.text
    (best / "evaluation.json").write_text("{}")
    assert read_best(config, run) == -math.inf and "evaluation.json is not the file that was saved" in caplog.text


@pytest.mark.parametrize("state_whole", [True, False])
def test_a_crash_before_the_last_marker_leaves_the_earlier_pair(state_whole: bool, tmp_path: Path) -> None:
    write_pairs(tmp_path, None, 2, 1)
    write(tmp_path / STATES[0], 3, whole=state_whole)
    write(tmp_path / DRAFTS[0], 3, whole=False)
    assert latest(tmp_path) == ("last_ds", 2)
    complete_saves(tmp_path)
    assert latest(tmp_path) == ("last_ds", 2)
    assert step_of(tmp_path / "checkpoint-last") == 2 and len(whole_folders(tmp_path)) == 4


def test_a_damaged_newest_never_pushes_out_the_whole_older_one(tmp_path: Path) -> None:
    """If all states are damaged, the run must not restart at 0, as it does in an empty folder."""
    assert find_latest(tmp_path) is None and find_latest(tmp_path / "absent") is None
    write(tmp_path / "last_ds", 4, whole=False)
    with pytest.raises(UserError, match="last_ds was not saved whole"):
        find_latest(tmp_path)
    write(tmp_path / "last_2ds", 2)
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
    """A launch that resumes from the older state replaces the damaged one and keeps the newer draft. If both are
    damaged, the error names both."""
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
    """Neither the last drafts nor the best one are removed, unless the user allowed it, and then only after the new
    run's save."""
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


def test_a_dangling_link_is_a_damaged_state(tmp_path: Path) -> None:
    """The run must not start at step 0 because a disk is not mounted."""
    (tmp_path / "last_ds").symlink_to("gone")
    with pytest.raises(UserError, match="last_ds was not saved whole"):
        find_latest(tmp_path)
    write(tmp_path / "last_2ds", 2)
    assert latest(tmp_path) == ("last_2ds", 2)
    save_twice(tmp_path, 3, ANY_RUN)
    assert [step_of(tmp_path / name) for name in ("last_ds", "last_2ds")] == [4, 3]


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


class FullDisk:
    """An engine whose shard does not fit on the disk."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save_checkpoint(self, folder: str, tag: str, **_: object) -> None:
        Path(folder).mkdir()
        (Path(folder) / "half").write_text("half")
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file data/3"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_said_and_the_older_checkpoints_stay(error: Exception, one_rank: None, tmp_path: Path) -> None:
    write_pairs(tmp_path, None, 2, 1)
    with pytest.raises(UserError, match=r"step 3 could not be written.*resume=latest") as said:
        save_checkpoint(FullDisk(error), None, stored_config(output_dir=str(tmp_path)), marker(3))
    assert "\n" not in str(said.value)
    assert latest(tmp_path) == ("last_ds", 2)
    complete_saves(tmp_path)
    assert whole_folders(tmp_path) == [("checkpoint-2last", 1), ("checkpoint-last", 2), ("last_2ds", 1), ("last_ds", 2)]


@cache
def composed(*groups: str) -> DictConfig:
    return compose_config(ROOT / "conf" / "exp", "tiny_glide_stage1_sinkpi-slicing", ["model=llama", *groups])


def stored_config(*groups: str, **overrides: str) -> TrainConfig:
    given = {"model_name_or_path": "target", "output_dir": "out", "data.files": "[x.jsonl]"} | overrides
    values = OmegaConf.from_dotlist([f"{key}={value}" for key, value in given.items()])
    return typed(OmegaConf.merge(composed(*groups), values))  # type: ignore[arg-type]


def test_a_checkpoint_without_a_ranks_shard_is_not_whole(
    one_rank: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host may lose the shared folder during a run, and its rank then writes to a disk of its own."""

    def save(folder: str, tag: str, **_: object) -> None:
        (Path(folder) / tag).mkdir(parents=True)
        (Path(folder) / tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()

    module = SimpleNamespace(draft_model=torch.nn.Linear(1, 1), draft_target=None)
    engine = SimpleNamespace(save_checkpoint=save, module=module)
    write_pairs(tmp_path, None, 2)
    with pytest.raises(SystemExit):
        save_checkpoint(engine, None, stored_config(output_dir=str(tmp_path)), marker(3))
    assert "rank 0 sees 1 of the 2 shards that the ranks wrote" in capsys.readouterr().err
    assert latest(tmp_path) == ("last_ds", 2)


def test_checkpoint_folder_as_model_names_target_and_draft(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-last"
    folder.mkdir()
    (folder / CONFIG_NAME).write_text(to_yaml(stored_config(model_name_or_path="the/target")))
    torch.save({}, folder / DRAFT_FILE)
    with pytest.raises(UserError, match="not saved whole"):
        locate(stored_config(model_name_or_path=str(folder)))
    write_marker(folder, marker(1))
    located = locate(stored_config(model_name_or_path=str(folder)))
    assert located.model_name_or_path == "the/target"
    assert located.draft_model_name_or_path == str(folder / DRAFT_FILE)
    located = locate(stored_config(model_name_or_path=str(folder), draft_model_name_or_path="mine.pth"))
    assert (located.model_name_or_path, located.draft_model_name_or_path) == ("the/target", "mine.pth")
    given = stored_config(draft_model_name_or_path="mine.pth")
    assert locate(given) == given
    (folder / DRAFT_FILE).write_bytes(b"cut off")
    with pytest.raises(UserError, match=f"{DRAFT_FILE} is not the file that was saved"):
        locate(stored_config(model_name_or_path=str(folder)))
    with pytest.raises(UserError, match=f"{folder}: not a DeepSpeed checkpoint"):
        read_draft(folder)


def test_going_on_with_other_settings_is_refused_by_key(tmp_path: Path) -> None:
    """Settings that change the meaning of earlier steps must stay; those that only change how the run executes may
    differ."""
    (tmp_path / CONFIG_NAME).write_text(to_yaml(stored_config()))
    write_marker(tmp_path, marker(2))
    check_same_run(stored_config(max_steps="9", save_steps="3"), tmp_path, 2, Contents())
    others = {"seed": "7", "loss": "mixed", "variant.name": "base", "data.pack": "false", "learning_rate": "0.5"}
    for key, value in others.items():
        with pytest.raises(UserError, match=f"of another run: {key}"):
            check_same_run(stored_config(**{key: value}), tmp_path, 2, Contents())


def test_the_same_rows_may_be_cut_otherwise(tmp_path: Path) -> None:
    before = stored_config(per_device_train_batch_size="2", gradient_accumulation_steps="2")
    (tmp_path / CONFIG_NAME).write_text(to_yaml(before))
    write_marker(tmp_path, marker(2))
    with pytest.raises(UserError, match=r"rows per step was 8, is 16; make"):
        check_same_run(before, tmp_path, 4, Contents())
    check_same_run(before, tmp_path, 2, Contents())
    other = stored_config(per_device_train_batch_size="1", gradient_accumulation_steps="2")
    other.deepspeed = stored_config("deepspeed=zero3").deepspeed
    check_same_run(other, tmp_path, 4, Contents())
