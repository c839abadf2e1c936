"""Bounded reading of configuration files that come with other people's weights.

A file is read only if it is regular and small. Links are followed, because the hub's cache consists of links. YAML has
neither aliases, whose expansion is exponential, nor interpolations, which could read environment variables.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import yaml

from longspec.errors import UserError, first_line

CONFIG_BYTES = 2**24
"""Size limit of a JSON configuration; the largest published ones have about a megabyte."""
YAML_BYTES = 2**20
SCALAR_CHARACTERS = 2**16
"""Length limit of a YAML value: PyYAML needs quadratic time for long numbers."""
MAX_DEPTH = 32
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
        raise UserError(f"{file}: {status.st_size} bytes; a file of this kind has at most {limit}")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON configuration. Raises UserError."""
    try:
        content = json.loads(_read_text(file, CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not a readable config ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a readable config (a {type(content).__name__}, not an object)")
    return content


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML configuration, values as they stand there. Raises UserError."""
    text = _read_text(file, YAML_BYTES)
    try:
        _check_events(file, text)
        content = yaml.load(text, Loader=_LOADER)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not a readable configuration ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a readable configuration (a {type(content).__name__}, not a mapping)")
    return content


def _read_text(file: Path, limit: int) -> str:
    check_regular(file, limit)
    try:
        with file.open("rb") as handle:
            return handle.read(limit).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def _check_events(file: Path, text: str) -> None:
    """Refuse YAML whose loading takes more than linear time, and interpolations in the values that YAML decodes."""
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
                raise UserError(f"{file}: a value of {len(event.value)} characters; at most {SCALAR_CHARACTERS}")
            if "${" in event.value:
                raise UserError(f"{file}: {event.value[:80]!r} is an interpolation; saved configurations have none")
        if depth > MAX_DEPTH:
            raise UserError(f"{file}: nested deeper than {MAX_DEPTH} levels")
