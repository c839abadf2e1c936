"""Rotation of checkpoints: a crash between any two acts of a save leaves a whole pair, and the newest one is found."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from training_fixtures import ROOT

from longspec.errors import UserError
from longspec.train import checkpoint
from longspec.train.checkpoint import (
    DRAFTS,
    MARKER,
    STATES,
    Progress,
    check_same_run,
    find_latest,
    is_whole,
    locate,
    read_draft,
    settle,
)
from longspec.train.config import CONFIG_NAME, TrainConfig, compose_config, to_yaml, typed

DRAFT_FILE = "draft_model_weights.pth"


def progress(step: int) -> Progress:
    return Progress(step, world_size=2)


def write(folder: Path, step: int, whole: bool = True) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "content").write_text(str(step))
    if whole:
        (folder / MARKER).write_text(json.dumps(asdict(progress(step))))


def step_of(folder: Path) -> int:
    assert is_whole(folder)
    return int((folder / "sub" / "content").read_text())


def generations(output: Path) -> list[tuple[str, int]]:
    return sorted((folder.name, step_of(folder)) for folder in output.iterdir())


class Crash(Exception):
    """Stands for a process that dies."""


def crash_at(act: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die before the `act`-th change of the file system, or half way through it if it removes a folder."""
    acts = iter(range(1000))

    def wrapped(change, before):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            if next(acts) == act:
                before(*args)
                raise Crash
            return change(*args, **kwargs)

        return run

    monkeypatch.setattr(Path, "rename", wrapped(Path.rename, lambda *_: None))
    monkeypatch.setattr(Path, "unlink", wrapped(Path.unlink, lambda *_: None))
    rmtree = shutil.rmtree
    monkeypatch.setattr(checkpoint.shutil, "rmtree", wrapped(rmtree, lambda folder: rmtree(folder / "sub")))


def test_saves_rotate_newest_to_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path / STATES[0], step)
        write(tmp_path / DRAFTS[0], step)
        settle(tmp_path)
    assert generations(tmp_path) == [
        ("checkpoint-2last", 2),
        ("checkpoint-last", 3),
        ("last_2ds", 2),
        ("last_ds", 3),
    ]
    assert find_latest(tmp_path) == (tmp_path / "last_ds", progress(3))


@pytest.mark.parametrize("act", range(9))
def test_a_crash_in_rotation_loses_nothing(act: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 acts: 2 to remove, 2 to rename, for each of the two kinds of folder; the ninth never comes."""
    for names in (STATES, DRAFTS):
        for name, step in zip(names, (3, 2, 1), strict=True):
            write(tmp_path / name, step)
    with monkeypatch.context() as dying:
        crash_at(act, dying)
        if act < 8:
            with pytest.raises(Crash):
                settle(tmp_path)
        else:
            settle(tmp_path)
    for names in (STATES, DRAFTS):
        assert any(is_whole(tmp_path / name) and step_of(tmp_path / name) >= 2 for name in names)
    assert find_latest(tmp_path) == (tmp_path / "last_ds", progress(3))
    assert step_of(tmp_path / "checkpoint-last") == 3
    assert not (tmp_path / STATES[0]).exists() and not (tmp_path / DRAFTS[0]).exists()
    assert all(step == 2 for name, step in generations(tmp_path) if "2" in name)


@pytest.mark.parametrize("state_whole", [True, False])
def test_a_crash_before_the_last_marker_leaves_the_earlier_pair(state_whole: bool, tmp_path: Path) -> None:
    for names in (STATES, DRAFTS):
        write(tmp_path / names[1], 2)
        write(tmp_path / names[2], 1)
    write(tmp_path / STATES[0], 3, whole=state_whole)
    write(tmp_path / DRAFTS[0], 3, whole=False)
    assert find_latest(tmp_path) == (tmp_path / "last_ds", progress(2))
    assert step_of(tmp_path / "checkpoint-last") == 2 and len(generations(tmp_path)) == 4


def test_fallback_to_the_older_is_said_and_counts_as_its_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "last_ds", 4, whole=False)
    write(tmp_path / "last_2ds", 2)
    assert find_latest(tmp_path) == (tmp_path / "last_2ds", progress(2))
    assert "last_2ds" in caplog.text and "older" in caplog.text


def test_a_damaged_newest_never_pushes_out_the_whole_older_one(tmp_path: Path) -> None:
    write(tmp_path / "last_ds", 4, whole=False)
    write(tmp_path / "last_2ds", 2)
    write(tmp_path / STATES[0], 3)
    write(tmp_path / DRAFTS[0], 3)
    settle(tmp_path)
    assert [step_of(tmp_path / name) for name in ("last_ds", "last_2ds")] == [3, 2]


def test_nothing_is_not_the_same_as_nothing_whole(tmp_path: Path) -> None:
    """An empty folder is a fresh run; states without a whole one among them must never restart at 0."""
    assert find_latest(tmp_path) is None and find_latest(tmp_path / "absent") is None
    write(tmp_path / "last_ds", 4, whole=False)
    with pytest.raises(UserError, match="neither last_ds nor last_2ds"):
        find_latest(tmp_path)


def stored_config(**overrides: str) -> TrainConfig:
    given = {"model_name_or_path": "target", "output_dir": "out", "data.files": "[x.jsonl]"} | overrides
    pairs = [f"{key}={value}" for key, value in given.items()]
    return typed(compose_config(ROOT / "conf" / "exp", "tiny_glide_stage1_sinkpi-slicing", pairs))


def test_checkpoint_folder_as_model_names_target_and_draft(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-last"
    folder.mkdir()
    (folder / CONFIG_NAME).write_text(to_yaml(stored_config(model_name_or_path="the/target")))
    torch.save({}, folder / DRAFT_FILE)
    with pytest.raises(UserError, match="not saved whole"):
        locate(stored_config(model_name_or_path=str(folder)))
    (folder / MARKER).touch()
    found = locate(stored_config(model_name_or_path=str(folder)))
    assert found.model_name_or_path == "the/target"
    assert found.draft_model_name_or_path == str(folder / DRAFT_FILE)
    found = locate(stored_config(model_name_or_path=str(folder), draft_model_name_or_path="mine.pth"))
    assert (found.model_name_or_path, found.draft_model_name_or_path) == ("the/target", "mine.pth")
    assert locate(stored_config()) == stored_config()


def test_deepspeed_state_as_model_is_told_to_be_the_folder_beside_it(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(to_yaml(stored_config()))
    (tmp_path / "latest").write_text("step4")
    with pytest.raises(UserError, match="give checkpoint-last"):
        locate(stored_config(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "7"),
        ("loss", "mixed"),
        ("variant", "base"),
        ("data.files", "[y.jsonl]"),
        ("data.pack", "false"),
        ("model_name_or_path", "other"),
        ("per_device_train_batch_size", "1"),
        ("deepspeed", "zero3"),
    ],
)
def test_going_on_with_other_settings_is_refused_by_key(key: str, value: str, tmp_path: Path) -> None:
    """Each would change what the steps so far stand for; what only changes how it runs may differ."""
    (tmp_path / CONFIG_NAME).write_text(to_yaml(stored_config()))
    check_same_run(stored_config(max_steps="9", save_steps="3"), tmp_path, progress(2), world_size=2)
    with pytest.raises(UserError, match=f"of another run: {key}") as error:
        check_same_run(stored_config(**{key: value}), tmp_path, progress(2), world_size=2)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="number of ranks was 2, is 4; make"):
        check_same_run(stored_config(), tmp_path, progress(2), world_size=4)


def test_extraction_names_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}: no whole DeepSpeed checkpoint"):
        read_draft(tmp_path)
