"""Reads weight files from untrusted sources without running code in them, and matrices that are stored in 8 bits."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from longspec.errors import UserError, first_line
from longspec.untrusted import check_regular

LFS_POINTER = b"version https://git-lfs"
SCALE = "_scale"
"""Suffix of the name of a matrix's scales."""
LARGEST = 127
FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that need no scale."""


def weight_files(source: Path) -> list[Path]:
    """The weight files of a target: safetensors if there are any, else .bin. Raises UserError."""
    for whole, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (source / whole).is_file():
            return [source / whole]
        if (source / index).is_file():
            with weight_errors(f"{source / index}: not a readable index"):
                names = sorted(set(json.loads((source / index).read_text())["weight_map"].values()))
                files = [source / name for name in names]
            if absent := [file.name for file in files if not file.is_file()]:
                raise UserError(f"{source}: {absent[0]} is missing, although {index} lists it")
            return files
    # The parts of a split target are subfolders, so the folder itself has no weights.
    for part in source.glob("mp_0-of-*"):
        world = part.name.rpartition("-")[2]
        raise UserError(f"{source}: a target split for {world} ranks; it needs tp_size {world}")
    raise UserError(f"{source}: no model checkpoint (no {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}, whole or with an index)")


def check_start(file: Path) -> None:
    """Raise UserError for a file that is not regular, or a Git LFS pointer."""
    check_regular(file)
    with file.open("rb") as handle:
        if handle.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{file}: a Git LFS pointer, not the weights; fetch them with git lfs pull")


@contextmanager
def weight_errors(problem: str) -> Iterator[None]:
    """Turn any error of a library into a UserError with a short reason, without torch's advice to allow code in the
    file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # torch and safetensors raise a dozen kinds for damaged files
        reason = first_line(error)
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):
            reason = (
                "its pickle is damaged, or holds something other than tensors, such as a whole module, which is not "
                "loaded because it can run code; its author can convert it with torch.save(module.state_dict(), FILE)"
            )
        raise UserError(f"{problem} ({reason})") from error


@dataclass(frozen=True)
class StoredWeight:
    """A weight in a safetensors file that is read when it is indexed."""

    file: Path
    name: str
    dtype: str
    """By safetensors' name, such as BF16."""
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Tensor:
        # The mapping of the file ends with the result, so that the pages of other weights take no memory.
        with safe_open(self.file, "pt") as weights:
            return weights.get_tensor(self.name)[index]


def stored_weights(folder: Path) -> dict[str, Any]:
    """The weights of a target by name: StoredWeights, or mapped tensors of .bin files. Raises UserError."""
    stored: dict[str, Any] = {}
    for file in weight_files(folder):
        with weight_errors(f"{file}: cannot be read"):
            if file.suffix != ".safetensors":
                stored |= read_weights(file)
                continue
            with safe_open(file, "pt") as weights:
                parts = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
                stored |= {
                    name: StoredWeight(file, name, part.get_dtype(), tuple(part.get_shape()))
                    for name, part in parts.items()
                }
    return stored


@contextmanager
def without_bar() -> Iterator[None]:
    """Context without transformers' progress bars, those of downloads included."""
    shown, is_hub_silent = logging.is_progress_bar_enabled(), are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
            if is_hub_silent:  # transformers switches the hub's bars, too
                disable_progress_bars()


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file or a pickle, on the CPU, mapped from the file. Raises UserError. A pickle's
    result keeps the `_metadata` of the state dict that was saved."""
    with weight_errors(f"{file}: not a readable file of plain weights"):
        check_start(file)
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:  # the unpickler creates only tensors and containers; an archive is mapped
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and _is_dense(weight) for name, weight in state.items()
    ):
        raise UserError(f"{file}: not a dictionary of plain weights")
    return state


def _is_dense(value: object) -> bool:
    """Whether a value is a dense tensor that holds data."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_nested)


def read_metadata(file: Path) -> dict[str, Any]:
    """The metadata of a weight file: of a safetensors header, or of the state dict in a pickle. Raises UserError."""
    if file.suffix != ".safetensors":
        metadata = getattr(read_weights(file), "_metadata", None)
        metadata = metadata.get("") if isinstance(metadata, dict) else None
    else:
        check_regular(file)
        with weight_errors(f"{file}: not a readable file of plain weights"), safe_open(file, "pt") as weights:
            metadata = weights.metadata()
    return metadata if isinstance(metadata, dict) else {}


def quantized(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with each floating-point matrix NAME as int8 [rows, columns] and NAME_scale, fp32 [rows]; half the size
    of bf16.

    scale[i] = max_j |w[i, j]| / 127        stored[i, j] = round(w[i, j] / scale[i])
    """
    stored: dict[str, Tensor] = {}
    for name, weight in state.items():
        if weight.dim() != 2 or not weight.is_floating_point():
            stored[name] = weight
            continue
        rows = weight.float()
        scale = rows.abs().amax(1) / LARGEST
        stored[name] = (rows / scale.where(scale > 0, 1.0)[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantized(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The matrices that `quantized` stored as fp32 [rows, columns], and all other tensors unchanged.

    source: the draft, for the message. Raises UserError for scales that do not fit their matrix.
    """
    restored = dict(state)
    for name in [name for name, weight in state.items() if weight.dtype == torch.int8]:
        if (scale := restored.pop(name + SCALE, None)) is None or scale.shape != state[name].shape[:1]:
            raise UserError(f"{source}: {name} is int8 without {name + SCALE}, one scale per row; save the draft again")
        restored[name] = state[name].float() * scale.float()[:, None]
    return restored
