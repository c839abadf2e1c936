"""Digests that identify a target and a draft by content, wherever their files are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.models.target_files import WEIGHT_FILES

CONFIG_FILES = ("config.json", "generation_config.json")
BLOCK = 64 * 1024
"""Bytes that are read at a time."""
BLOCKS = 64
"""Blocks that are read of a large file."""
DIGEST_BYTES = 16


def target_digest(target: str, config: PreTrainedConfig) -> str:
    """Identity of a target: a digest of its folder's configs and weights, or a hub id with its commit.

    Weight files count with name, size and evenly spaced blocks, so a digest of 64 GB takes less than a second. It tells
    training runs and precisions apart; it can miss an edit of single values in a file larger than BLOCKS * BLOCK bytes.
    """
    folder = Path(target)
    if not folder.is_dir():
        return f"{target}@{getattr(config, '_commit_hash', None)}"
    files = {file for pattern in (*CONFIG_FILES, *WEIGHT_FILES) for file in folder.glob(pattern) if file.is_file()}
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as handle:
            for start in range(0, size, max(BLOCK, size // BLOCKS)):
                handle.seek(start)
                digest.update(handle.read(BLOCK))
    return digest.hexdigest()


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Digest of all names, dtypes, shapes and values of a state dict on the CPU."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
