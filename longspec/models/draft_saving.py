"""Writing draft weights, as a `.pth` file and in Hugging Face form."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.models.draft_files import TRAINED_KEY, option_entries, strip_prefix
from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.replacing import replacing


def save_draft_file(state: Mapping[str, Tensor], file: str | Path, options: DraftOptions = PUBLISHED) -> None:
    """Write a `.pth` of plain weights without the prefix, with the options in the state dict's metadata."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    # torch keeps `_metadata` of an OrderedDict, and loaders of plain weights ignore it.
    weights = OrderedDict(strip_prefix(state))
    weights._metadata = {"": {"version": 1, **option_entries(options)}}  # type: ignore[attr-defined]
    # torch stores the name of a path, but not that of a stream.
    with replacing(file) as unfinished, unfinished.open("wb") as stream:
        torch.save(weights, stream)


def save_draft_folder(
    state: Mapping[str, Tensor],
    config: PreTrainedConfig,
    folder: str | Path,
    options: DraftOptions = PUBLISHED,
    is_trained: bool = True,
) -> None:
    """Write a draft in Hugging Face form (`config.json` of its target + safetensors), ready for the hub."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().contiguous() for name, w in strip_prefix(state).items()}
    entries = option_entries(options)
    with replacing(folder / "model.safetensors") as unfinished:
        save_file(weights, unfinished, {"format": "pt"} | {key: json.dumps(value) for key, value in entries.items()})
    # A trained draft has no such key, so files of other tools count as trained.
    settings = entries | ({} if is_trained else {TRAINED_KEY: False})
    with replacing(folder / "config.json") as unfinished:
        unfinished.write_text(json.dumps(json.loads(config.to_json_string()) | settings, indent=2) + "\n")
