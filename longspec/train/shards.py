"""DeepSpeed's sharded optimizer state: reading it per parameter, and loading it on any number of ranks.

Each rank saves flat fp32 tensors with its share of the draft: the master weights and the optimizer's moments. AdamW has
two moments. Parameters that Muon trains form their own group and have one.

- ZeRO-1 and 2: a group's parameters are concatenated and cut into one piece per rank. The file maps pieces to names.
- ZeRO-3: each parameter is cut into equally long pieces, one per rank, and the last piece is padded.
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

from longspec.models.draft_files import DRAFT_PREFIX
from longspec.models.draft_vocabulary import MAPS
from longspec.models.weight_files import weight_errors
from longspec.train.distributed import data_parallel_rank_and_size

MASTERS = "master weights"
"""Kind of state that is not a moment: the fp32 weights."""
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENT = "momentum_buffer"


def enum_member(kind: Any, name: str) -> int:
    """Restricted `getattr` for unpickling. Python 3.11.0 to 3.11.2 pickle enum members as attributes of their class."""
    if kind is not zero_stage or name not in ZeroStageEnum.__members__:
        raise UnpicklingError(f"{name} of {kind} is not a member of ZeroStageEnum")
    return int(ZeroStageEnum[name])


def zero_stage(value: int) -> int:
    """Replacement for ZeroStageEnum in unpickling, which returns a plain number.

    A pickle may set attributes on every object that it creates, and enum members are shared by the whole process.
    """
    return int(ZeroStageEnum(value))


SAVED_CLASSES: list[Any] = [
    LossScaler,
    fragment_address,
    (zero_stage, f"{ZeroStageEnum.__module__}.ZeroStageEnum"),
    (enum_member, "builtins.getattr"),
]
"""Classes and functions that DeepSpeed's files contain in addition to tensors. Files with others are rejected."""


class Shards:
    """The optimizer state in a saved DeepSpeed state (`last_ds`). Tensors are read from disk when they are used."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for files that are not plain state (see `load_plain`)."""
        # DeepSpeed names the folder of the last save in the file `latest`.
        states = folder / (folder / "latest").read_text().strip()
        files = sorted(states.glob("*_optim_states.pt"), key=_rank)
        self.ranks: list[dict[str, Any]] = [load_plain(file)["optimizer_state_dict"] for file in files]
        module_state = load_plain(min(states.glob("*_model_states.pt"), key=_rank))
        groups = module_state["param_shapes"]
        self.shapes: dict[str, torch.Size] = {
            name.removeprefix(DRAFT_PREFIX): shape for group in groups for name, shape in group.items()
        }
        saved = module_state["module"]
        self.vocabulary_maps: dict[str, Tensor] = {
            name: saved[DRAFT_PREFIX + name].clone() for name in MAPS if DRAFT_PREFIX + name in saved
        }
        """The draft's vocabulary list, {} if it has none."""
        self.is_zero3 = "fp32_flat_groups" in self.ranks[0]

    @property
    def step(self) -> int:
        """The number of steps that AdamW has taken."""
        return next(int(state["step"]) for state in self._states(self.ranks[0]) if "step" in state)

    def parameters(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Unprefixed name and fp32 tensor, on the CPU, of each parameter with state of `kind`: MASTERS or a moment."""
        pieces = self._zero3_pieces(kind) if self.is_zero3 else self._concatenated_pieces(kind)
        for name, shape in self.shapes.items():
            if name in pieces:
                yield name, torch.cat(pieces[name])[: shape.numel()].view(shape)

    def _concatenated_pieces(self, kind: str) -> dict[str, list[Tensor]]:
        """The pieces of each parameter in order of rank, under ZeRO-1 and 2."""
        pieces = defaultdict(list)
        for rank in self.ranks:
            for flat, addresses in zip(self._flat_tensors(rank, kind), rank["param_slice_mappings"], strict=True):
                if flat is None:
                    continue
                for name, address in addresses.items():
                    piece = flat[address.start : address.start + address.numel]
                    pieces[name.removeprefix(DRAFT_PREFIX)].append(piece)
        return pieces

    def _zero3_pieces(self, kind: str) -> dict[str, list[Tensor]]:
        """The pieces of each parameter in order of rank, under ZeRO-3; {} if there is no state of `kind`."""
        lengths = [math.ceil(shape.numel() / len(self.ranks)) for shape in self.shapes.values()]
        pieces: dict[str, list[Tensor]] = {name: [] for name in self.shapes}
        for rank in self.ranks:
            flat_tensors = [flat for flat in self._flat_tensors(rank, kind) if flat is not None]
            if not flat_tensors:
                return {}
            for name, piece in zip(self.shapes, torch.cat(flat_tensors).split(lengths), strict=True):
                pieces[name].append(piece)
        return pieces

    def _flat_tensors(self, rank: dict[str, Any], kind: str) -> list[Tensor | None]:
        """A rank's flat tensor of each group; None for a group without state of `kind`."""
        if kind == MASTERS:
            return rank["fp32_flat_groups" if self.is_zero3 else "single_partition_of_fp32_groups"]
        return [state.get(kind) for state in self._states(rank)]

    def _states(self, rank: dict[str, Any]) -> list[dict[str, Any]]:
        """A rank's optimizer state of each group."""
        states = rank["optimizer_state_dict" if self.is_zero3 else "base_optimizer_state"]["state"]
        return [states[number] for number in sorted(states)]


def load_plain(file: Path) -> dict[str, Any]:
    """The content of a DeepSpeed file, with tensors memory-mapped. Raises UserError if it could run code."""
    problem = f"{file}: not a file of plain state as DeepSpeed saves it"
    with weight_errors(problem), torch.serialization.safe_globals(SAVED_CLASSES):
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _rank(file: Path) -> int:
    """The rank in a file's name, which text order would sort as 0, 1, 10, 2."""
    match = re.search(r"pp_rank_(\d+)", file.name)
    return int(match[1]) if match else 0


def adopt(engine: Any, shards: Shards) -> None:
    """Load saved master weights, moments and step count into an engine that has not stepped yet.

    The number of ranks may differ from that of the save. Before the first step, DeepSpeed can write a whole parameter
    only into the sharded master weights. Each moment is therefore written there first and copied to its own tensors;
    the master weights themselves come last.
    """
    parameters = dict(engine.module.draft_model.named_parameters())
    optimizer = engine.optimizer.optimizer
    muon_flats, adamw_flats = _flat_parameters(engine)
    flats_by_kind = {MUON_MOMENT: muon_flats, MASTERS: []}
    for kind in (*ADAMW_MOMENTS, MUON_MOMENT, MASTERS):
        for name, value in shards.parameters(kind):
            _set_master(parameters[name], value)
        for flat in flats_by_kind.get(kind, adamw_flats):
            optimizer.state[flat][kind] = flat.detach().clone()

    # Muon trains the other parameters with an AdamW of its own. torch's AdamW counts steps in a tensor, DeepSpeed's in
    # a number.
    adamw = getattr(optimizer, "aux_optimizer", optimizer)
    in_tensor = isinstance(adamw, torch.optim.AdamW)
    step = shards.step
    for flat in adamw_flats:
        optimizer.state[flat]["step"] = torch.tensor(float(step)) if in_tensor else step
    engine.global_steps = step


def _flat_parameters(engine: Any) -> tuple[list[Any], list[Any]]:
    """The flat master weights that Muon trains and those that AdamW trains, by group."""
    groups = engine.optimizer.optimizer.param_groups
    muon_flats = [flat for group in groups if group.get("use_muon") for flat in group["params"]]
    # ZeRO-3 fills AdamW's groups only during a step.
    if (adamw_flats := getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)) is None:
        adamw_flats = [flat for group in groups if not group.get("use_muon") for flat in group["params"]]
    return muon_flats, adamw_flats


def _set_master(parameter: Any, value: Tensor) -> None:
    """Write a whole parameter into its sharded master weights."""
    if not hasattr(parameter, "ds_tensor"):
        safe_set_full_fp32_param(parameter, value)
        return
    # ZeRO-3. DeepSpeed's own function for whole parameters does not pad the last rank's piece.
    length = parameter.ds_tensor.numel()
    rank, _ = data_parallel_rank_and_size()
    piece = value.flatten()[rank * length : (rank + 1) * length]
    safe_set_local_fp32_param(parameter, F.pad(piece, (0, length - len(piece))))
