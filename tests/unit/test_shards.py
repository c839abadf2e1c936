"""Sharded optimizer state that is loaded by an engine with another layout."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from training_fixtures import NEEDS_MUON, make_target, single_rank_config, write_texts

from longspec.errors import UserError
from longspec.train import shards
from longspec.train.checkpoint import saved_draft
from longspec.train.config import CONFIG_NAME, to_yaml
from longspec.train.engine import build_engine, build_pair
from longspec.train.inputs import read_inputs
from longspec.train.shards import ADAMW_MOMENTS, MASTERS, MUON_MOMENT, Shards, adopt, load_plain
from longspec.train.trainer import Trainer

NEVER: Any = SimpleNamespace(agreed=lambda *_: False)
BF16 = "model.torch_dtype=bfloat16"
MUON = "optimizer=muon"
RATE = "learning_rate=0.01"


def saved(trainer: Trainer, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The number of AdamW's steps, and the saved tensors by name."""
    trainer.engine.save_checkpoint(str(folder), tag="now", exclude_frozen_parameters=True)
    (folder / CONFIG_NAME).write_text(to_yaml(trainer.config))
    read, kinds = Shards(folder), (MASTERS, *ADAMW_MOMENTS, MUON_MOMENT)
    return read.step, {f"{name}, {kind}": value for kind in kinds for name, value in read.parameters(kind)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["deepspeed=zero1"], ["deepspeed=zero3", "+deepspeed.zero_optimization.sub_group_size=1000"]),
        (["deepspeed=zero3"], ["deepspeed=zero2"]),
        pytest.param(["deepspeed=zero1", BF16], ["deepspeed=zero3", BF16], marks=pytest.mark.slow),
        pytest.param(["deepspeed=zero3", BF16], ["deepspeed=zero1", BF16], marks=pytest.mark.slow),
        pytest.param([MUON, BF16], [MUON, BF16], marks=[NEEDS_MUON, pytest.mark.slow]),
    ],
    ids=" ".join,
)
def test_another_layout_takes_the_same_next_step(
    before: list[str], after: list[str], one_rank: None, tmp_path: Path
) -> None:
    make_target(tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", count=3)
    config, other_config = (single_rank_config(tmp_path, RATE, *layout) for layout in (before, after))
    inputs = read_inputs(config)
    batch = inputs.collate([inputs.rows[0]])
    arrays = {name: tensor.numpy() for name, tensor in batch.items()}

    def take(trainer: Trainer, step: int) -> dict[str, float]:
        trainer.steps.start(step, iter([arrays]))
        metrics = trainer.steps.take(step, NEVER)
        assert metrics is not None
        return {name: value for name, value in metrics.items() if "seconds" not in name}

    engine = build_engine(config, build_pair(config, None))
    first = Trainer(config, engine, inputs, total_steps=3)
    for step in (1, 2):
        take(first, step)
    steps, state = saved(first, tmp_path / "first")
    assert steps == 2 and all(value.abs().sum() > 0 for value in state.values())
    other_engine = build_engine(other_config, build_pair(other_config, saved_draft(tmp_path / "first")))
    adopt(other_engine, Shards(tmp_path / "first"))
    second = Trainer(other_config, other_engine, inputs, total_steps=3)
    assert saved(second, tmp_path / "adopted")[0] == 2
    metrics = [take(trainer, 3) for trainer in (first, second)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)
    (steps, state), (again, other) = saved(first, tmp_path / "one"), saved(second, tmp_path / "other")
    assert steps == again == 3
    torch.testing.assert_close(other, state, rtol=1e-6, atol=1e-7)


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
