"""Sharded optimizer state that is loaded by an engine with another layout."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from longspec.errors import UserError
from longspec.train import shards
from longspec.train.shards import MASTERS, Shards, load_plain


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
