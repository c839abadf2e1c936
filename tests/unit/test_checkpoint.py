"""What a checkpoint holds, whether it was saved whole, which run may go on from it, and on which ranks."""

import errno
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from omegaconf import DictConfig, OmegaConf
from test_generations import DRAFT_FILE, latest, marker, whole_folders, write_pairs
from training_fixtures import ROOT

from longspec.errors import UserError
from longspec.train import shards
from longspec.train.checkpoint import locate, read_best, read_draft, save_checkpoint
from longspec.train.config import compose_config, to_yaml, typed
from longspec.train.config_schema import CONFIG_NAME, TrainConfig
from longspec.train.generations import BEST, complete_saves
from longspec.train.markers import Contents, Run, write_marker
from longspec.train.resume import check_same_run
from longspec.train.shards import MASTERS, Shards, load_plain


def test_the_best_so_far_is_read_back_if_it_can_be_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is -inf if the draft is damaged or was the best on other rows, so that the next evaluation replaces it."""
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


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:783] . PytorchStreamWriter failed writing file data/3"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_said_and_the_older_checkpoints_stay(error: Exception, one_rank: None, tmp_path: Path) -> None:
    def save(folder: str, tag: str, **_: object) -> None:
        Path(folder).mkdir()
        (Path(folder) / "half").write_text("half")
        raise error

    write_pairs(tmp_path, None, 2, 1)
    with pytest.raises(UserError, match=r"step 3 could not be written.*resume=latest") as said:
        save_checkpoint(SimpleNamespace(save_checkpoint=save), None, stored_config(output_dir=str(tmp_path)), marker(3))
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


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_without_a_ranks_shard_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    """Settings that change the meaning of earlier steps must stay; those that only change its execution may differ."""
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


def save_state(folder: Path, ranks: list[dict[str, Any]], shapes: dict[str, torch.Size]) -> Shards:
    """Write the parts of DeepSpeed's files that are read."""
    (folder / "now").mkdir(parents=True)
    (folder / "latest").write_text("now")
    torch.save({"param_shapes": [shapes], "module": {}}, folder / "now" / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for number, rank in enumerate(ranks):
        file = folder / "now" / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": rank}, file)
    return Shards(folder)


def test_shares_that_do_not_divide_are_padded_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 on 11 ranks, the last of which hold only padding. File names must not be sorted as text."""
    values = {"one": torch.arange(1.0, 8).view(7), "two": torch.arange(10.0, 36).view(13, 2)}
    ranks = []
    for number in range(11):
        mine: list[torch.Tensor] = []
        monkeypatch.setattr(shards, "data_parallel_rank_and_size", lambda number=number: (number, 11))
        monkeypatch.setattr(shards, "safe_set_local_fp32_param", lambda _, value, mine=mine: mine.append(value))
        for value in values.values():
            shards._set_master(SimpleNamespace(ds_tensor=torch.empty(-(-value.numel() // 11))), value)
        ranks.append({"fp32_flat_groups": [torch.cat(mine)]})
    saved = save_state(tmp_path, ranks, {f"draft_model.{name}": value.shape for name, value in values.items()})
    torch.testing.assert_close(dict(saved.parameters(MASTERS)), values, rtol=0, atol=0)


class Made:
    """An object that unpickling makes by a call, and whose attributes the file may set."""

    def __init__(self, *how: Any, **attributes: Any) -> None:
        self.how = how[0], how[1:], attributes or None

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


def test_a_member_of_an_enumeration_is_read_whatever_python_wrote_it(tmp_path: Path) -> None:
    """Some versions of Python 3.11 pickle it as an attribute of its class."""
    torch.save([Made(getattr, ZeroStageEnum, "weights"), ZeroStageEnum.weights], tmp_path / "state.pt")
    assert load_plain(tmp_path / "state.pt") == [ZeroStageEnum.weights] * 2


@pytest.mark.parametrize(
    "made",
    [
        Made(os.system, "false"),
        Made(ZeroStageEnum, 3, altered=True),
        Made(getattr, ZeroStageEnum, "weights", altered=True),
        Made(getattr, LossScaler, "__init__"),
    ],
)
@pytest.mark.parametrize("part", ["model", "optim"])
def test_a_state_that_is_more_than_data_is_refused(part: str, made: Made, tmp_path: Path) -> None:
    """Code, other attributes, and changes to an enumeration that the whole process shares."""
    save_state(tmp_path, [{}], {})
    torch.save({"param_shapes": made}, tmp_path / "now" / f"zero_pp_rank_0_mp_rank_00_{part}_states.pt")
    with pytest.raises(UserError, match=f"{part}_states.pt: not a file of plain state as DeepSpeed saves it"):
        Shards(tmp_path)
    assert not hasattr(ZeroStageEnum.weights, "altered")
