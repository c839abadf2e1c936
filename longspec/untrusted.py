"""Safe reading of configuration files from untrusted sources, such as downloaded checkpoints.

Only small regular files are read. Links are followed, because the hub's cache consists of links. YAML files may contain
neither aliases, whose expansion can be exponential, nor interpolations, which could read environment variables.
"""

import json
import stat
from pathlib import Path
from typing import Any

import yaml

from longspec.errors import UserError, first_line

CONFIG_BYTES = 2**24
"""Size limit of a JSON configuration. The largest published ones have about a megabyte."""
YAML_BYTES = 2**20
"""Size limit of a YAML configuration."""
SCALAR_CHARACTERS = 2**16
"""Length limit of a YAML value. PyYAML needs quadratic time for long numbers."""
MAX_DEPTH = 32
"""Depth limit of nested YAML collections."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_regular(file: Path, limit: int | None = None) -> None:
    """Raise UserError unless `file` is a regular file, or a link to one, of at most `limit` bytes."""
    try:
        status = file.stat()
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{file}: not a regular file")
    if limit is not None and status.st_size > limit:
        raise UserError(f"{file}: {status.st_size} bytes, more than the limit of {limit}")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON configuration. Raises UserError if it is unreadable, too large or not an object."""
    try:
        content = json.loads(_read_text(file, CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not a readable config ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a readable config (must be an object, not a {type(content).__name__})")
    return content


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML configuration. Raises UserError if it is unreadable, too large or not a mapping."""
    text = _read_text(file, YAML_BYTES)
    try:
        _check_events(file, text)
        content = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not a readable configuration ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a readable configuration (must be a mapping, not a {type(content).__name__})")
    return content


def _read_text(file: Path, limit: int) -> str:
    check_regular(file, limit)
    try:
        with file.open("rb") as handle:
            return handle.read(limit).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def _check_events(file: Path, text: str) -> None:
    """Raise UserError for YAML that takes more than linear time to load or contains interpolations.

    Events hold the decoded values, so an escaped interpolation is found, too.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{file}: YAML aliases are not accepted in a saved configuration")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > SCALAR_CHARACTERS:
                raise UserError(
                    f"{file}: a value of {len(event.value)} characters, more than the limit of {SCALAR_CHARACTERS}"
                )
            if "${" in event.value:
                raise UserError(
                    f"{file}: {event.value[:80]!r} is an interpolation, which a saved configuration may not contain"
                )
        if depth > MAX_DEPTH:
            raise UserError(f"{file}: nested deeper than {MAX_DEPTH} levels")
