"""Content digests of files. Neither path, size nor modification time stands for content."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longspec.errors import UserError

WEIGHT_SUFFIXES = (".safetensors", ".bin")
WHOLE_BYTES = 512 << 20
"""Largest weight file that is read completely."""
STRIDE_BYTES, BLOCK_BYTES = 1 << 20, 4 << 10


def content_hash(data: bytes = b"") -> Any:
    """A hash object for all content digests: BLAKE2b, 128 bits."""
    return hashlib.blake2b(data, digest_size=16)


def file_digest(file: str | Path) -> str:
    """Digest of a file's bytes as 32 hex digits. Raises UserError for a file that cannot be read.

    A weight file above WHOLE_BYTES is sampled: its size, its first and last MiB (the header of a safetensors file, the
    directory of a .bin file) and 4 KiB of each MiB between, so that every matrix of 1 MiB or more counts. 65 GB of
    weights need 260 MB of reads; an edit of single values can be missed.
    """
    try:
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size <= WHOLE_BYTES or not str(file).endswith(WEIGHT_SUFFIXES):
                return hashlib.file_digest(handle, content_hash).hexdigest()
            digest = content_hash(f"{size}\0".encode())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            last = size - STRIDE_BYTES
            for start in (*range(0, last, STRIDE_BYTES), last):
                is_end = start in (0, last)
                digest.update(os.pread(handle.fileno(), STRIDE_BYTES if is_end else BLOCK_BYTES, start))
            return digest.hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def file_digests(files: Iterable[str | Path]) -> list[str]:
    """The digest of each file, in order. Raises UserError."""
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return list(pool.map(file_digest, files))
