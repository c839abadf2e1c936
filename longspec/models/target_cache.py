"""The user's cache of converted targets: GGUF files, and the targets that have a name."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from longspec.digests import file_digests
from longspec.errors import UserError, first_line
from longspec.models.packaged_targets import PACKAGED, fetched_folder
from longspec.replacing import replacing
from longspec.user_cache import user_cache

SUFFIX = ".gguf"
CONVERSION = 2
"""Version of the conversion and its manifest. Folders of other versions are ignored."""
MANIFEST = "conversion.json"


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
    parts = target.installed_parts()
    if len(parts) == len(target.packages):
        return converted(parts, target.stem, target.sha256)
    # Once they are converted, the wheels are no longer needed.
    if _is_whole(folder := _folder(target.stem, target.sha256), target.sha256):
        return folder
    problem = f"{name}: {target.absence()}"
    if target.hub_id is None:
        raise UserError(problem)
    return fetched_folder(target.hub_id, problem)


def _whole_download(hub_id: str) -> Path | None:
    """The folder of a model in the hub's cache, None unless it is complete."""
    from longspec.models.weight_files import cached_folder  # imports torch

    folder = cached_folder(hub_id)
    # An interrupted download may have left any part of the files.
    whole = folder is not None and all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))
    return folder if whole else None


def converted(parts: Sequence[Path], stem: str, expected: str | None = None) -> Path:
    """The folder with the converted model of a GGUF file. Converts it unless the cache has an undamaged copy.

    parts: the file, or consecutive parts of it. stem: start of the folder's name. expected: the file's SHA-256, in hex;
    the parts are read only if they must be converted. Safe to call from several processes at once. Raises UserError.
    """
    source = str(parts[0]) if parts else stem
    try:
        digest = expected or _digest(*parts)
        folder = _folder(stem, digest)
        if _is_whole(folder, digest):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not _is_whole(folder, digest):  # another process may have converted it meanwhile
                if expected is not None and (found := _digest(*parts)) != expected:
                    raise UserError(f"{source}: damaged (its SHA-256 is {found}, not {expected}); install it again")
                _convert(parts, digest, folder)
    except OSError as error:
        raise UserError(f"{source}: cannot be converted into {user_cache('targets')} ({first_line(error)})") from error
    return folder


def _folder(stem: str, digest: str) -> Path:
    """The folder of a converted file. The content is part of the name: a new file of an old name is another target."""
    return user_cache("targets") / f"{stem}-{digest[:16]}-{CONVERSION}"


def _convert(parts: Sequence[Path], digest: str, folder: Path) -> None:
    from longspec.models.gguf import convert_gguf  # imports torch

    if folder.exists():
        shutil.rmtree(folder)
    with replacing(folder, folder=True) as unfinished:
        joined = unfinished / f"joined{SUFFIX}"
        if len(parts) > 1:  # gguf maps a single file into memory
            with joined.open("wb") as whole:
                for part in parts:
                    with part.open("rb") as handle:
                        shutil.copyfileobj(handle, whole)
        convert_gguf(joined if len(parts) > 1 else parts[0], unfinished)
        joined.unlink(missing_ok=True)
        names = sorted(path.name for path in unfinished.iterdir())
        # Written last, so that a folder without it is not whole.
        manifest = {"source": parts[0].name, "source_sha256": digest, "digests": _digests(unfinished, names)}
        (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether `folder` holds the conversion of the file with that digest, and all its files are unchanged.

    Every start of a command asks this, so large files are sampled (see `file_digest`).
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        written = _digests(folder, list(manifest["digests"]))
        return manifest["source_sha256"] == digest and manifest["digests"] == written
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return False


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, file_digests(folder / name for name in names), strict=True))


def _digest(*files: Path) -> str:
    """The SHA-256 of the concatenated files, in hex."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            hashlib.file_digest(handle, lambda: digest)
    return digest.hexdigest()
