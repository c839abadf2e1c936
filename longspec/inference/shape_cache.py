"""The cache of measured tree shapes: one JSON file per model, device and context."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.models.glide import GlideMixin

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of the cache's files."""


def cache_folder() -> Path:
    """The folder of the cache, in $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longspec" / "tree_shapes"


def cache_file(key: dict[str, Any]) -> Path:
    """The file of a key."""
    return cache_folder() / f"{_digest(key)}.json"


def cache_key(
    runner: Runner, prompts: Tensor, sampler: Sampler, tree_rule: str, candidates: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Everything that the fastest shape depends on. The context length is rounded up to a power of two."""
    # The same target under another path or another version of transformers has the same fastest shape.
    config = runner.config.to_dict()
    unrelated = ("_name_or_path", "transformers_version", "architectures")
    device = runner.device
    return {
        "target": _digest({name: value for name, value in config.items() if name not in unrelated}),
        "draft": draft_fingerprint(runner.model),
        "window": runner.model.draft_model.window,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention": runner.attention.name,
        "captured": runner.capturable,
        "dtype": str(runner.dtype),
        "rows": len(prompts),
        "context": 1 << (prompts.shape[1] - 1).bit_length(),
        "tree_rule": "greedy" if sampler.greedy else tree_rule,
        "candidates": candidates,
        "format": FORMAT,
    }


def draft_fingerprint(model: GlideMixin) -> str:
    """A digest of the draft's weights.

    It is made of the sum of each weight's bit patterns as integers, which is the same on every device.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {}
    for name, weight in model.draft_model.named_parameters():
        bits = weight.detach().contiguous().view(integers[weight.element_size()])
        sums[name] = int(bits.sum(dtype=torch.int64))
    return _digest(sums)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def load_shape(path: Path, candidates: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape in a file of the cache. None if there is no file, or, with a warning, if the file is damaged."""
    try:
        shape = tuple(json.loads(path.read_text())["shape"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        logger.warning("%s: damaged; the tree shape is measured again", path)
        return None
    if shape not in candidates:
        logger.warning("%s: %s is not a candidate; the tree shape is measured again", path, shape)
        return None
    return shape


def store_shape(path: Path, key: dict[str, Any], shape: tuple[int, ...], measured: list[dict[str, Any]]) -> None:
    """Write a file of the cache atomically. On failure a warning is logged, and each process measures again.

    measured: the figures of all candidates, for reading.
    """
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"key": key, "shape": shape, "measured": measured}, indent=2) + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        logger.warning("%s: the tree shape is not kept (%s)", path, error)
