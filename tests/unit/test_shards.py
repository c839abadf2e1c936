"""An optimizer state that is cut anew: what one engine saved, another one with another layout goes on from."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_fixtures import ROOT, make_target, one_rank_alone, write_texts

from longspec.errors import UserError
from longspec.train.checkpoint import saved_draft
from longspec.train.config import CONFIG_NAME, TrainConfig, load_config, to_yaml
from longspec.train.engine import build_engine, build_pair
from longspec.train.inputs import read_inputs
from longspec.train.shards import MASTERS, MOMENTS, Shards, adopt
from longspec.train.trainer import Trainer

NEVER: Any = SimpleNamespace(agreed=lambda: False)
BF16 = "model.torch_dtype=bfloat16"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from one_rank_alone(monkeypatch)


def configured(work: Path, *overrides: str) -> TrainConfig:
    given = [
        f"model_name_or_path={work}/target",
        f"data.files={work}/data.jsonl",
        f"output_dir={work}/out",
        f"data.cache_dir={work}/cache",
    ]
    arguments = ["-cp", str(ROOT / "conf/exp"), "-cn", "tiny_glide_stage1_sinkpi-slicing", *given]
    config = load_config([*arguments, "gradient_accumulation_steps=1", "learning_rate=0.01", *overrides])
    assert config is not None
    return config


def saved(trainer: Trainer, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """The steps that AdamW has taken, and its tensors by name."""
    trainer.engine.save_checkpoint(str(folder), tag="now", exclude_frozen_parameters=True)
    (folder / CONFIG_NAME).write_text(to_yaml(trainer.config))
    shards, kinds = Shards(folder), (MASTERS, *MOMENTS)
    return shards.step, {f"{name}, {kind}": value for kind in kinds for name, value in shards.parameters(kind)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["deepspeed=zero1"], ["deepspeed=zero3"]),
        (["deepspeed=zero3"], ["deepspeed=zero2"]),
        (["deepspeed=zero1", BF16], ["deepspeed=zero3", BF16]),
        (["deepspeed=zero3", BF16], ["deepspeed=zero1", BF16]),
    ],
    ids=" ".join,
)
def test_another_layout_takes_the_same_next_step(
    before: list[str], after: list[str], one_rank: None, tmp_path: Path
) -> None:
    make_target(tmp_path / "target")
    write_texts(tmp_path / "data.jsonl", count=3)
    config, other_config = configured(tmp_path, *before), configured(tmp_path, *after)
    inputs = read_inputs(config)
    batch = inputs.collate([inputs.rows[0]])
    first = Trainer(config, build_engine(config, build_pair(config, None)), inputs, 0, 3, 0)
    for step in (1, 2):
        first.train_step(step, [dict(batch)], NEVER)
    steps, state = saved(first, tmp_path / "first")
    assert steps == 2 and all(value.abs().sum() > 0 for value in state.values())
    other_engine = build_engine(other_config, build_pair(other_config, saved_draft(tmp_path / "first")))
    adopt(other_engine, Shards(tmp_path / "first"))
    second = Trainer(other_config, other_engine, inputs, 0, 3, 0)
    assert saved(second, tmp_path / "adopted")[0] == 2
    metrics = [trainer.train_step(3, [dict(batch)], NEVER) for trainer in (first, second)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-6)
    (steps, state), (again, other) = saved(first, tmp_path / "one"), saved(second, tmp_path / "other")
    assert steps == again == 3
    torch.testing.assert_close(other, state, rtol=1e-6, atol=1e-7)


class Command:
    """What a pickle can be made to run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("false",)


@pytest.mark.parametrize("part", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_state_that_carries_code_is_refused(part: str, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("now")
    (tmp_path / "now").mkdir()
    torch.save({"optimizer_state_dict": {}}, tmp_path / "now" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save({"param_shapes": []}, tmp_path / "now" / "mp_rank_00_model_states.pt")
    Shards(tmp_path)
    torch.save({"param_shapes": Command()}, tmp_path / "now" / part)
    with pytest.raises(UserError, match=f"{part}: not a file of plain state"):
        Shards(tmp_path)
