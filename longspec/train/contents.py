"""Digests of the data and the target that a run trains on, which do not depend on paths or modification times."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from longspec.data.records import data_files
from longspec.errors import UserError
from longspec.models.target_files import WEIGHT_FILES, read_config
from longspec.train.config import TrainConfig

Digests = list[list[str]]
"""Name and digest of each file, in the order in which they are read."""
TARGET_FILES = ("config.json", "tokenizer*", "vocab*", "merges.txt", "chat_template*")
"""Files of a target, next to its weights, that change what a draft learns."""
WHOLE_BYTES = 512 << 20
STRIDE_BYTES, BLOCK_BYTES = 1 << 20, 4 << 10


@dataclass(frozen=True)
class Contents:
    """Digests of the files that a run reads."""

    data: Digests
    held_out: Digests
    target: Digests


def contents_of(config: TrainConfig) -> Contents:
    """The digests of a run's data and target. Reads all of the data once. Raises UserError for files that are gone."""
    held_out = config.evaluation.files
    return Contents(
        _digests(data_files(config.data.files)),
        [] if held_out is None else _digests(data_files(held_out)),
        target_digests(config.model_name_or_path),
    )


def target_digests(target: str) -> Digests:
    """The digests of a target's weights, configuration and tokenizer; a hub id is named by its commit."""
    folder = Path(target)
    if not folder.is_dir():
        return [[target, str(getattr(read_config(target), "_commit_hash", None))]]
    names = (*WEIGHT_FILES, *TARGET_FILES)
    patterns = (*names, *(f"mp_*-of-*/{name}" for name in names))  # the parts of a split target
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return [[os.path.relpath(path, folder), digest] for path, digest in _digests(sorted(map(str, files)))]


def changes(before: Contents, now: Contents) -> list[str]:
    """What differs between the data and target of a checkpoint and those of the run that resumes from it."""
    return [*_changes("data.files", before.data, now.data), *_changes("model_name_or_path", before.target, now.target)]


def _changes(key: str, before: Digests, now: Digests) -> list[str]:
    """Names of files do not count: `now` may be the same data at another path."""
    old, new = ([digest for _, digest in digests] for digests in (before, now))
    if old == new:
        return []
    if len(old) != len(new):
        return [f"{key}: {len(old)} files then, {len(new)} now"]
    if sorted(old) == sorted(new):
        return [f"{key}: the same files in another order"]
    changed = [name for (name, digest), other in zip(now, old, strict=True) if digest != other]
    more = f" (and of {len(changed) - 1} more)" if len(changed) > 1 else ""
    return [f"{key}: the contents of {changed[0]}{more} changed"]


def _digests(files: list[str]) -> Digests:
    with ThreadPoolExecutor() as pool:
        return [[file, digest] for file, digest in zip(files, pool.map(file_digest, files), strict=True)]


def file_digest(file: str) -> str:
    """blake2b of a file. Of a weight file above 512 MiB only a sample is read: its size, its first and last MiB (the
    header of a safetensors file, the directory of a .bin file) and 4 KiB of each MiB between, so that every matrix of
    1 MiB or more is sampled. For 65 GB of weights these are 260 MB instead. Raises UserError."""
    size_limit = WHOLE_BYTES if file.endswith((".safetensors", ".bin")) else None
    try:
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size_limit is None or size <= size_limit:
                return hashlib.file_digest(handle, "blake2b").hexdigest()
            digest = hashlib.blake2b(f"{size}\0".encode())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            last = size - STRIDE_BYTES
            for start in (*range(0, last, STRIDE_BYTES), last):
                whole = start in (0, last)
                digest.update(os.pread(handle.fileno(), STRIDE_BYTES if whole else BLOCK_BYTES, start))
            return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
