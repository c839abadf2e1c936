"""Writing draft weights, as a `.pth` file and in Hugging Face form."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.models.architectures import draft_class
from longspec.models.draft import Options
from longspec.models.draft_files import TRAINED_KEY, strip_prefix
from longspec.models.draft_layer import PUBLISHED, GlideDecoderLayer
from longspec.models.target_sample import TargetSample
from longspec.models.weight_files import quantized
from longspec.replacing import replacing


def save_draft_file(
    state: Mapping[str, Tensor], file: str | Path, options: Options = PUBLISHED, target: TargetSample | None = None
) -> None:
    """Write a `.pth` of plain weights without the prefix, with options and target in the state dict's metadata."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # torch keeps `_metadata` of an OrderedDict, and loaders of plain weights ignore it.
    weights = OrderedDict(strip_prefix(state))
    weights._metadata = {"": {"version": 1, **_entries(options, target)}}  # type: ignore[attr-defined]
    # torch stores the name of a path, but not that of a stream.
    with replacing(file) as unfinished, unfinished.open("wb") as stream:
        torch.save(weights, stream)


def save_draft_folder(
    state: Mapping[str, Tensor],
    config: PreTrainedConfig,
    folder: str | Path,
    options: Options = PUBLISHED,
    is_trained: bool = True,
    target: TargetSample | None = None,
    int8: bool = False,
) -> None:
    """Write a draft in Hugging Face form (`config.json` of its target + safetensors), ready for the hub.

    target: the sample of the target that it was trained for, if known. int8: whether matrices are stored in 8 bits
    (see `weight_files.quantized`), which only this project reads.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().contiguous() for name, w in strip_prefix(state).items()}
    content = draft_class(options.architecture, GlideDecoderLayer).folder_config(config, options, weights)
    if int8:
        weights = quantized(weights)
    entries = _entries(options, target)
    with replacing(folder / "model.safetensors") as unfinished:
        save_file(weights, unfinished, {"format": "pt"} | {key: json.dumps(value) for key, value in entries.items()})
    # A trained draft has no such key, so files of other tools count as trained.
    settings = entries | ({} if is_trained else {TRAINED_KEY: False})
    with replacing(folder / "config.json") as unfinished:
        unfinished.write_text(json.dumps(content | settings, indent=2) + "\n")


def _entries(options: Options, target: TargetSample | None) -> dict[str, Any]:
    return options.entries() | (target.entries() if target else {})
