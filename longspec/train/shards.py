"""DeepSpeed's sharded optimizer state, put together parameter by parameter and cut anew for the ranks that go on.

Each rank saved flat fp32 tensors of its share of the draft: master weights, and AdamW's two moments or, of those that
Muon trains, which are a group of their own, its one. Under ZeRO-1 and 2 the share is a piece of all of a group's
parameters laid end to end, and the file says what of it is whose. Under ZeRO-3 it is a piece of each parameter, all
ranks' equally long, the last one's padded.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_PREFIX
from longspec.models.target_files import WEIGHT_ERRORS, weight_problem
from longspec.train.distributed import data_parallel_place

MASTERS = "master weights"
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENT = "momentum_buffer"


def enum_member(kind: Any, name: str) -> int:
    """Stands for `getattr`, by which Python 3.11.0 to 3.11.2 pickles the members of an enumeration."""
    if kind is not zero_stage or name not in ZeroStageEnum.__members__:
        raise UnpicklingError(f"{name} of {kind}, which is no member of ZeroStageEnum")
    return int(ZeroStageEnum[name])


# The name under which torch's loader looks it up.
enum_member.__module__, enum_member.__name__, enum_member.__qualname__ = "builtins", "getattr", "getattr"


def zero_stage(value: int) -> int:
    """Stands for ZeroStageEnum, as a number. Members of an enumeration exist once in a process, and torch's loader lets
    a file set the attributes of every object that it may create."""
    return int(ZeroStageEnum(value))


# The name under which torch's loader looks it up.
zero_stage.__module__, zero_stage.__qualname__ = ZeroStageEnum.__module__, ZeroStageEnum.__qualname__
zero_stage.__name__ = ZeroStageEnum.__name__

SAVED_CLASSES = [LossScaler, zero_stage, enum_member, fragment_address]
"""Classes in DeepSpeed's files other than tensors and numbers. A file with any other one is refused, not run."""


class Shards:
    """The optimizer state in a saved DeepSpeed state (`last_ds`), read as far as it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError as `load_plain` does."""
        states = folder / (folder / "latest").read_text().strip()
        files = sorted(states.glob("*_optim_states.pt"), key=_rank)
        self.ranks: list[dict[str, Any]] = [load_plain(file)["optimizer_state_dict"] for file in files]
        groups = load_plain(min(states.glob("*_model_states.pt"), key=_rank))["param_shapes"]
        self.shapes: dict[str, torch.Size] = {
            name.removeprefix(DRAFT_PREFIX): shape for group in groups for name, shape in group.items()
        }
        self.by_parameter = "fp32_flat_groups" in self.ranks[0]  # ZeRO-3

    @property
    def step(self) -> int:
        """How many steps AdamW has taken."""
        return next(int(state["step"]) for state in self._states(self.ranks[0]) if "step" in state)

    def parameters(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(name, without `draft_model.`; fp32 tensor of its shape on the CPU) of the MASTERS or moment of each
        parameter that has one."""
        pieces = self._pieces_by_parameter(kind) if self.by_parameter else self._pieces_end_to_end(kind)
        for name, shape in self.shapes.items():
            if name in pieces:
                yield name, torch.cat(pieces[name])[: shape.numel()].view(shape)

    def _pieces_end_to_end(self, kind: str) -> dict[str, list[Tensor]]:
        pieces = defaultdict(list)
        for rank in self.ranks:
            for flat, addresses in zip(self._flats(rank, kind), rank["param_slice_mappings"], strict=True):
                if flat is None:
                    continue
                for name, address in addresses.items():
                    piece = flat[address.start : address.start + address.numel]
                    pieces[name.removeprefix(DRAFT_PREFIX)].append(piece)
        return pieces

    def _pieces_by_parameter(self, kind: str) -> dict[str, list[Tensor]]:
        lengths = [math.ceil(shape.numel() / len(self.ranks)) for shape in self.shapes.values()]
        flats = [[flat for flat in self._flats(rank, kind) if flat is not None] for rank in self.ranks]
        if not all(flats):
            return {}
        cut = [torch.cat(mine).split(lengths) for mine in flats]
        return dict(zip(self.shapes, map(list, zip(*cut, strict=True)), strict=True))

    def _flats(self, rank: dict[str, Any], kind: str) -> list[Tensor | None]:
        """Group by group; None for a group that has no such moment."""
        if kind == MASTERS:
            return rank["fp32_flat_groups" if self.by_parameter else "single_partition_of_fp32_groups"]
        return [state.get(kind) for state in self._states(rank)]

    def _states(self, rank: dict[str, Any]) -> list[dict[str, Any]]:
        states = rank["optimizer_state_dict" if self.by_parameter else "base_optimizer_state"]["state"]
        return [states[number] for number in sorted(states)]


def load_plain(file: Path) -> dict[str, Any]:
    """What DeepSpeed saved, its tensors left on the disk until they are used. UserError for a file with more in it."""
    try:
        with torch.serialization.safe_globals(SAVED_CLASSES):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except WEIGHT_ERRORS as error:
        raise UserError(f"{file}: not a file of plain state as DeepSpeed saves it ({weight_problem(error)})") from error


def _rank(file: Path) -> int:
    found = re.search(r"pp_rank_(\d+)", file.name)
    return int(found[1]) if found else 0


def adopt(engine: Any, shards: Shards) -> None:
    """Put saved master weights, moments and step count into an engine that has not stepped yet, on any number of ranks.

    Which of them lie where is the engine's affair: it lets one write whole master weights, so each moment goes there
    first and is copied from there to its own place.
    """
    parameters = dict(engine.module.draft_model.named_parameters())
    optimizer = engine.optimizer.optimizer
    groups = optimizer.param_groups
    muons = [flat for group in groups if group.get("use_muon") for flat in group["params"]]
    adamws = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)  # ZeRO-3 tells AdamW of them step by step
    if adamws is None:
        adamws = [flat for group in groups if not group.get("use_muon") for flat in group["params"]]
    for kind in (*ADAMW_MOMENTS, MUON_MOMENT, MASTERS):
        for name, value in shards.parameters(kind):
            _set_master(parameters[name], value)
        for flat in {MUON_MOMENT: muons, MASTERS: []}.get(kind, adamws):
            optimizer.state[flat][kind] = flat.detach().clone()
    adamw = getattr(optimizer, "aux_optimizer", optimizer)  # Muon's own, for what it does not train
    step, is_torchs = shards.step, isinstance(adamw, torch.optim.AdamW)  # DeepSpeed's own counts in plain numbers
    for flat in adamws:
        optimizer.state[flat]["step"] = torch.tensor(float(step)) if is_torchs else step


def _set_master(parameter: Any, value: Tensor) -> None:
    if not hasattr(parameter, "ds_tensor"):
        safe_set_full_fp32_param(parameter, value)
        return
    length = parameter.ds_tensor.numel()  # DeepSpeed's own cut leaves no room for the last rank's padding
    start = data_parallel_place()[0] * length
    mine = value.flatten()[start : start + length]
    safe_set_local_fp32_param(parameter, F.pad(mine, (0, length - len(mine))))
