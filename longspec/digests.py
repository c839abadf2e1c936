"""Content digests of files, which depend neither on paths nor on modification times."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from longspec.errors import os_errors

WEIGHT_SUFFIXES = (".safetensors", ".bin")
WHOLE_BYTES = 512 << 20
"""Largest weight file in bytes that is read completely."""
STRIDE_BYTES = 1 << 20
"""Distance in bytes between two samples of a larger weight file."""
BLOCK_BYTES = 4 << 10
"""Size of a sample in bytes."""
content_hash = partial(hashlib.blake2b, digest_size=16)
"""The hash of all content digests: BLAKE2b with 128 bits."""


def file_digest(file: str | Path) -> str:
    """The digest of a file's bytes as 32 hex digits. Raises UserError for a file that cannot be read.

    A weight file above WHOLE_BYTES is sampled: its size, its first and last MiB (the header of a safetensors file, the
    directory of a .bin file) and 4 KiB of each MiB between. The digest depends on every matrix of 1 MiB or more, but a
    change of single values can be missed. 65 GB of weights need 260 MB of reads.
    """
    with os_errors(f"{file}: cannot be read"), open(file, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        if size <= WHOLE_BYTES or not str(file).endswith(WEIGHT_SUFFIXES):
            return hashlib.file_digest(handle, content_hash).hexdigest()
        digest = content_hash(f"{size}\0".encode())
        # Without this hint the kernel would read ahead far beyond each block.
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        last = size - STRIDE_BYTES
        for start in (*range(0, last, STRIDE_BYTES), last):
            length = STRIDE_BYTES if start in (0, last) else BLOCK_BYTES
            digest.update(os.pread(handle.fileno(), length, start))
        return digest.hexdigest()


def file_digests(files: Iterable[str | Path]) -> list[str]:
    """The digest of each file, in order. Raises UserError as `file_digest` does."""
    # Hashing releases the GIL.
    with ThreadPoolExecutor() as pool:
        return list(pool.map(file_digest, files))
