"""Digests that identify targets and drafts by content, independent of paths."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.digests import content_hash, file_digests
from longspec.models.target_files import WEIGHT_FILES

TARGET_FILES = (
    *(*WEIGHT_FILES, "config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer*", "vocab*", "merges.txt", "chat_template*"),
)
"""Files of a target that affect what it generates and what its draft learns."""

COMMIT = re.compile("[0-9a-f]{40}")

Digests = list[list[str]]
"""Name and digest of each file, in order."""


def target_digests(target: str, config: PreTrainedConfig) -> Digests:
    """Relative names and digests of a target's weights, configuration and tokenizer. A hub id is identified by its
    commit, and so is a snapshot folder in the hub's cache. Raises UserError for a file that cannot be read."""
    folder = Path(target)
    # A commit identifies its files, so gigabytes of weights need not be read.
    if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
        return [[target, folder.name]]
    if not folder.is_dir():
        return [[target, str(getattr(config, "_commit_hash", None))]]
    patterns = (*TARGET_FILES, *(f"mp_*-of-*/{name}" for name in TARGET_FILES))  # the parts of a split target
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return [[os.path.relpath(path, folder), digest] for path, digest in zip(files, file_digests(files), strict=True)]


def target_digest(target: str, config: PreTrainedConfig) -> str:
    """Identity of a target: one digest over its `target_digests`, or a hub id with its commit."""
    # A split target has the same digest for all ranks: the parts are files below its folder.
    digests = target_digests(target, config)
    if not Path(target).is_dir():
        return "@".join(digests[0])
    return content_hash(json.dumps(digests).encode()).hexdigest()


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Digest of all names, dtypes, shapes and values of a state dict."""
    digest = content_hash()
    for name, tensor in sorted(state.items()):
        # Separators, so that different names and shapes never give the same bytes.
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
