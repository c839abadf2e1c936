"""The start of a launch in a folder with content: refused, resumed, or started from the draft in it."""

import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import noted
from training_fixtures import (
    equal_drafts,
    make_work,
    metrics,
    one_rank_alone,
    refused_training,
    single_rank_config,
    timeless,
)

from longspec.errors import UserError
from longspec.locks import LOCK_NAME, locked
from longspec.models.draft_files import load_draft
from longspec.ranks.agreement import Termination
from longspec.train.config import read_config_file
from longspec.train.config_schema import CONFIG_NAME, TrainConfig
from longspec.train.evaluation import Evaluation
from longspec.train.generations import find_latest
from longspec.train.logging import RunLog
from longspec.train.markers import Contents, damage, read_marker
from longspec.train.resume import changes
from longspec.train.run import train, warn_of_few_steps
from longspec.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 2


def configured(work: Path, *overrides: str) -> TrainConfig:
    return single_rank_config(work, f"max_steps={STEPS}", "save_steps=1", "evaluation.rows=2", *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that saved each of them, with its target and data."""
    work = make_work(tmp_path_factory.mktemp("finished"), texts=6, held_out=6)
    with pytest.MonkeyPatch.context() as patch:
        for _ in one_rank_alone(patch):
            train(configured(work), Termination())
    return work


@pytest.fixture
def work(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run. Its saved paths are those of the original."""
    return shutil.copytree(finished, tmp_path / "work", symlinks=True)


def tree(folder: Path) -> dict[str, Any]:
    """The content of all files in a folder except the lock."""
    files = {path: path.stat() for path in sorted(folder.rglob("*")) if path.name != LOCK_NAME}
    return {str(path): (stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in files.items()}


def refusal(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """The single error line of a launch, which must not change anything."""
    before = tree(Path(config.output_dir))
    line = refused_training(config, capsys)
    assert tree(Path(config.output_dir)) == before
    return line


def test_a_draft_without_its_state_is_started_from_and_kept(
    work: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The old draft survives more saves than there are generations. A new launch is refused."""
    output = work / "out"
    for state in ("last_ds", "last_2ds"):
        shutil.rmtree(output / state)
    before = shutil.copytree(output / "checkpoint-last", work / "before")
    draft = load_draft(before)
    assert "holds a checkpoint (checkpoint-last)" in refusal(configured(work), capsys)

    def draft_of(trainer: Trainer, termination: Termination) -> dict[str, torch.Tensor]:
        parameters = trainer.engine.module.draft_model.named_parameters()
        return {name: weight.detach().clone() for name, weight in parameters}

    with pytest.MonkeyPatch.context() as patch:
        started = noted(patch, Trainer, "run", draft_of)
        train(configured(work, "resume=latest", "max_steps=3"), Termination())
    said = [record.getMessage() for record in caplog.records if "no DeepSpeed state" in record.getMessage()]
    assert len(said) == 1 and "checkpoint-last has no DeepSpeed state" in said[0]
    assert "draft of step 2 at step 0" in said[0]
    assert started[0].keys() == draft.keys() and all(torch.equal(draft[name], one) for name, one in started[0].items())
    assert [line["step"] for line in metrics(output)] == [1, 2, 3]
    assert len((output / "metrics-earlier-1.jsonl").read_text().splitlines()) == STEPS
    assert find_latest(output)[1].step == 3  # type: ignore[index]
    assert any(equal_drafts(before, kept) for kept in output.glob("checkpoint-earlier-*"))


def test_a_folder_is_overwritten_only_by_a_run_that_saves(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = work / "out"
    assert "overwrite_output_dir=true" in refusal(configured(work), capsys)
    before = {name: read_marker(output / name) for name in ("last_ds", "checkpoint-last", "checkpoint-2last")}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda self, termination: False)
        train(configured(work, "overwrite_output_dir=true", "seed=7"), Termination())
    assert {name: read_marker(output / name) for name in before} == before
    train(configured(work, "overwrite_output_dir=true", "seed=7", "max_steps=1"), Termination())
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == ["checkpoint-last", "last_ds"]
    train(configured(work, "resume=latest", "seed=7"), Termination())


def changed_weights(work: Path) -> Path:
    file = work / "target" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    return file


def swapped_texts(work: Path) -> Path:
    """Other data of the same size and modification time."""
    file = work / "texts.jsonl"
    stat, lines = file.stat(), file.read_text().splitlines(keepends=True)
    file.write_text("".join(reversed(lines)))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return file


@pytest.mark.parametrize("change", [changed_weights, swapped_texts])
def test_changed_contents_are_refused_by_name(change: Any, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path, size and time of a changed file may be the same."""
    file = change(work)
    line = refusal(configured(work, "resume=latest", "max_steps=3"), capsys)
    assert "the contents changed" in line and file.name in line


def test_the_same_contents_at_another_path_resume(work: Path, caplog: pytest.LogCaptureFixture) -> None:
    (work / "elsewhere").mkdir()
    (work / "texts.jsonl").rename(work / "elsewhere" / "data.jsonl")
    (work / "target").rename(work / "elsewhere" / "target")
    caplog.set_level("INFO", "longspec")
    moved = [f"data.files={work}/elsewhere/data.jsonl", f"model_name_or_path={work}/elsewhere/target"]
    train(configured(work, "resume=latest", "max_steps=3", *moved), Termination())
    assert [line["step"] for line in metrics(work / "out")] == [1, 2, 3]
    assert "3 steps are few" in caplog.text and "raise max_steps" in caplog.text
    warn_of_few_steps(2, None)
    assert "train on about 250 times as much data" in caplog.text
    assert f"longspec bench {work}/elsewhere/target --draft {work}/out/checkpoint-last\n" in caplog.text


def test_a_gguf_target_is_saved_and_resumed_by_the_users_name(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converted folder exists on one machine only, so the run must resume with another cache."""
    pytest.importorskip("gguf")
    from gguf_files import write_gguf

    write_gguf(file := tmp_path / "tiny.gguf")
    given = [f"model_name_or_path={file}", f"output_dir={tmp_path}/out", "resume=latest"]
    for steps in (1, 2):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{steps}"))
        train(configured(finished, *given, f"max_steps={steps}"), Termination())
        assert read_config_file(tmp_path / "out" / "checkpoint-last" / CONFIG_NAME).model_name_or_path == str(file)
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]


def test_a_second_run_is_refused_while_the_first_has_the_folder(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without checkpoints in the folder. The lock ends with the first run."""
    for output in (work / "out", work / "empty"):
        config = configured(work, f"output_dir={output}", "resume=latest", "seed=7")
        output.mkdir(exist_ok=True)
        with locked(output):
            assert f"another run is writing to {output}" in refusal(config, capsys)
    train(configured(work, f"output_dir={work}/empty", "max_steps=1"), Termination())
    refused = pytest.raises(UserError, match=rf"output_dir: .*{LOCK_NAME} cannot be written \(File exists\)")
    with refused, locked(work / "out" / LOCK_NAME):
        pass


def test_an_interrupted_evaluation_is_repeated_on_resume(
    work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM interrupts evaluations in the middle and at the end. The best draft is that of an uninterrupted run."""
    caplog.set_level(logging.INFO)
    given = [f"evaluation.files={work}/held_out.jsonl", "evaluation.steps=1", "evaluation.keep_best=true"]
    straight, cut = work / "straight", work / "cut"
    train(configured(work, *given, f"output_dir={straight}"), Termination())
    trained = [{name: value for name, value in line.items() if "eval" not in name} for line in timeless(straight)]
    assert trained == timeless(work / "out"), "an evaluation changes nothing of the training"
    assert equal_drafts(work / "out" / "checkpoint-last", straight / "checkpoint-last")
    rows: list[int] = []

    class Stopping(Termination):
        def agreed(self, patience_s: float = 0) -> bool:
            if rows:
                self.received = signal.SIGTERM
            return self.received is not None

    for step in range(1, STEPS + 1):
        with monkeypatch.context() as patch:
            noted(patch, Evaluation, "score_row", lambda evaluation, row: row, rows)
            finished = train(configured(work, *given, f"output_dir={cut}", "resume=latest"), Stopping())
            assert not finished and f"SIGTERM: stopped after step {step}, in its evaluation; resume" in caplog.text
            rows.clear()
        latest = find_latest(cut)
        assert latest is not None and latest[1].step == step and "eval_loss" not in metrics(cut)[-1]
        if step == 1:
            train(configured(work, *given, f"output_dir={cut}", "resume=latest", "max_steps=1"), Termination())
            assert "eval_loss" in metrics(cut)[-1]
    train(configured(work, *given, f"output_dir={cut}", "resume=latest"), Termination())
    lines = [{line["step"]: line for line in timeless(output)} for output in (straight, cut)]
    assert lines[0] == lines[1]
    best = [json.loads((output / "checkpoint-best" / "evaluation.json").read_text()) for output in (straight, cut)]
    chosen = max(metrics(straight), key=lambda line: line["eval_acceptance_length"])
    assert best[0]["step"] == best[1]["step"] == chosen["step"] and best[0].items() <= chosen.items()
    assert equal_drafts(straight / "checkpoint-best", cut / "checkpoint-best")
    assert damage(cut / "checkpoint-best") is None and (cut / "checkpoint-best" / "tokenizer.json").is_file()
    before = (cut / "metrics.jsonl").read_bytes()
    train(configured(work, *given, f"output_dir={cut}", "resume=latest"), Termination())
    assert "nothing left to do" in caplog.text and (cut / "metrics.jsonl").read_bytes() == before


def test_a_full_disk_loses_no_line_that_was_written(work: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk is full when lines of a lost step are cut off, or when a new line is written."""
    config, path = configured(work), work / "out" / "metrics.jsonl"
    before = path.read_bytes()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    unfinished.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        RunLog(config, 0, 1, STEPS)
    assert path.read_bytes() == before and not unfinished.is_symlink()
    # An unreadable line costs no other line.
    path.write_bytes(b'{"step": 1}\n\xff\n7\n{"step": 2}\n{"step": 3}\n{"step"')
    RunLog(config, 0, 2, 4).close()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    log = RunLog(config, 0, 2, 4)
    path.unlink()
    path.symlink_to("/dev/full")
    log.step({"step": 3, "loss": 1.0})
    assert "step 3 cannot be written (No space left on device)" in caplog.text


def test_metrics_that_cannot_be_read_are_one_line(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = work / "out" / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    line = refusal(configured(work, "resume=latest"), capsys)
    assert line.endswith("metrics.jsonl: cannot be read (Is a directory)")


COMMITS = ("a" * 40, "b" * 40)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (["x 1", "y 2"], ["x 1"], "was y 2, is no file"),
        (["x 1"], ["x 1", "z 3"], "was no file , is z 3"),
        ([f"org/t {COMMITS[0]}"], [f"org/t {COMMITS[1]}"], f"was org/t {COMMITS[0]}, is org/t {COMMITS[1]}"),
        ([f"org/t {COMMITS[0]}"], [f"/cache/snapshots/{COMMITS[0]} {COMMITS[0]}"], ""),
    ],
)
def test_changed_files_and_commits_are_named(before: list[str], now: list[str], message: str) -> None:
    old, new = ([line.split() for line in lines] for lines in (before, now))
    differences = changes(Contents(target=old), Contents(target=new))
    assert message in "".join(differences) and bool(differences) is bool(message)
