"""Every form in which draft weights lie on disk, and whether they fit a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from longspec.errors import UserError, first_line
from longspec.models.draft_layer import WINDOW
from longspec.models.target_files import HUB_ERRORS, WEIGHT_ERRORS

DRAFT_WEIGHTS_NAME = "draft_model_weights.pth"
DRAFT_PREFIX = "draft_model."
TRAINING_CONFIG_NAME = "training_config.yaml"
"""What a training run leaves beside its draft."""
WINDOW_KEY = "draft_window"
"""In the `config.json` of a draft in Hugging Face form."""
DEAD_WEIGHTS = {f"cross_attn.{p}_proj.{kind}" for p in "kv" for kind in ("weight", "bias")}
"""In published drafts; the cross-attention reads the target's keys and values, so nothing ever used them."""


def resolve_draft(path: str | Path) -> Path:
    """A local `.pth` file or folder for `path`; anything that is not on disk is taken for a hub id and fetched."""
    local = Path(path)
    if local.exists():
        return local
    if local.suffix in {".pth", ".bin", ".pt"} or local.is_absolute() or str(path).startswith("."):
        raise UserError(f"{path}: no such draft; give a .pth file, a folder or a hub id")
    try:
        return Path(snapshot_download(str(path)))
    except HUB_ERRORS as error:
        raise UserError(
            f"{path}: no such draft on disk or on the hub; give a .pth file, a folder or a hub id"
        ) from error


def load_draft(path: str | Path) -> dict[str, Tensor]:
    """Draft weights on the CPU, `draft_model.` stripped, from any form that `resolve_draft` accepts.

    A folder holds `draft_model_weights.pth`, or is in Hugging Face form: `config.json` with safetensors or
    `pytorch_model*.bin`. Files are read without running code from them. Raises UserError.
    """
    place = resolve_draft(path)
    if place.is_file():
        return strip_prefix(_load_file(place))
    for pattern in (DRAFT_WEIGHTS_NAME, "*.safetensors", "pytorch_model*.bin"):
        if files := sorted(place.glob(pattern)):
            return strip_prefix({name: tensor for file in files for name, tensor in _load_file(file).items()})
    raise UserError(f"{path}: no draft in this folder ({DRAFT_WEIGHTS_NAME}, *.safetensors or pytorch_model*.bin)")


def _load_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except WEIGHT_ERRORS as error:
        raise UserError(f"{file}: not a readable file of plain weights ({first_line(error)})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{file}: not a dictionary of draft weights")
    return state


def strip_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The draft's part of a state dict: keys under `draft_model.` without it, or all keys if none has it."""
    draft = {name.removeprefix(DRAFT_PREFIX): w for name, w in state.items() if name.startswith(DRAFT_PREFIX)}
    return draft or dict(state)


def fit_draft(state: Mapping[str, Tensor], layer: nn.Module, source: str) -> dict[str, Tensor]:
    """`state` without prefix and dead weights, if it fits `layer` (which may lie on the meta device).

    Raises UserError that names `source` and every missing, unexpected or misshapen key.
    """
    given = {name: w for name, w in strip_prefix(state).items() if name not in DEAD_WEIGHTS}
    wanted = layer.state_dict()
    faults = [f"missing {name}" for name in wanted.keys() - given.keys()]
    faults += [f"unexpected {name}" for name in given.keys() - wanted.keys()]
    faults += [
        f"{name} is {list(given[name].shape)}, the target needs {list(wanted[name].shape)}"
        for name in wanted.keys() & given.keys()
        if given[name].shape != wanted[name].shape
    ]
    if faults:
        raise UserError(f"{source}: this draft does not fit the target: {'; '.join(sorted(faults))}")
    return given


def check_draft(path: str | Path, config: PreTrainedConfig, layer_class: Any) -> dict[str, Tensor]:
    """The weights at `path` if they belong to a target with `config`, before that target is loaded.

    Compares family and head layout (where the draft's folder names them) and every shape. Raises UserError.
    """
    place = resolve_draft(path)
    if (place / "config.json").is_file():
        _compare_configs(place / "config.json", config)
    _compare_run((place if place.is_dir() else place.parent) / TRAINING_CONFIG_NAME, layer_class)
    with torch.device("meta"):
        layer = layer_class(config)
    return fit_draft(load_draft(place), layer, str(path))


def draft_window(path: str | Path) -> int:
    """The self-attention window W, in tokens, that the draft at `path` was trained with, as the files beside it say.

    Published drafts do not: theirs is 512. Raises UserError.
    """
    place = resolve_draft(path)
    folder = place if place.is_dir() else place.parent
    run, config = folder / TRAINING_CONFIG_NAME, folder / "config.json"
    if run.is_file():
        return int(yaml.safe_load(run.read_text()).get("model", {}).get("window", WINDOW))
    return int(json.loads(config.read_text()).get(WINDOW_KEY, WINDOW)) if config.is_file() else WINDOW


def _compare_configs(file: Path, config: PreTrainedConfig) -> None:
    try:
        draft = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a readable config ({first_line(error)})") from error
    for name in ("model_type", "num_attention_heads", "num_key_value_heads", "head_dim"):
        wanted = getattr(config, name, None)
        if wanted is not None and draft.get(name, wanted) not in (None, wanted):
            raise UserError(f"{file}: a draft for a target with {name} {draft[name]}; this target has {wanted}")


def _compare_run(file: Path, layer_class: type[nn.Module]) -> None:
    """Our checkpoint folders say which class of pair was trained in them."""
    if not file.is_file():
        return
    pair = str(yaml.safe_load(file.read_text()).get("model", {}).get("_target_")).split(".")[-2:][0]
    if not layer_class.__name__.startswith(pair):
        raise UserError(f"{file.parent}: a draft trained as {pair}; this target needs a {layer_class.__name__}")


def save_draft_folder(
    state: Mapping[str, Tensor], config: PreTrainedConfig, folder: str | Path, window: int = WINDOW
) -> None:
    """Write a draft in Hugging Face form (`config.json` of its target + safetensors), ready for the hub."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.contiguous() for name, w in strip_prefix(state).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    named = json.loads((folder / "config.json").read_text()) | {WINDOW_KEY: window}
    (folder / "config.json").write_text(json.dumps(named, indent=2) + "\n")
