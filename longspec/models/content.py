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
WHOLE = 64 * 2**20
"""Bytes up to which a file is read as a whole; of a larger one, BLOCK bytes of every STRIDE are."""
STRIDE, BLOCK = 2**20, 4096
DIGEST_BYTES = 16


def target_digest(target: str, config: PreTrainedConfig) -> str:
    """Identity of a target: a digest of its file or of its folder's configs and weights, or a hub id with its commit.

    Large files count with name, size and samples: 260 MB are read for 65 GB of weights, some of every matrix of 1 MiB
    or more. So it tells fine-tuned weights apart, and can miss an edit of single values.
    """
    path = Path(target)
    if path.is_file():
        files = {path}
    elif path.is_dir():
        files = {file for pattern in (*CONFIG_FILES, *WEIGHT_FILES) for file in path.glob(pattern) if file.is_file()}
    else:
        return f"{target}@{getattr(config, '_commit_hash', None)}"
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode(errors="surrogateescape"))
        with file.open("rb") as handle:
            stride, block = (STRIDE, BLOCK) if size > WHOLE else (STRIDE, STRIDE)
            for start in range(0, size, stride):
                handle.seek(start)
                digest.update(handle.read(block))
    return digest.hexdigest()


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Digest of all names, dtypes, shapes and values of a state dict on the CPU."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
