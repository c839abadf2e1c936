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
    text = _read_text(file, CONFIG_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not a readable config ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a readable config (must be an object, not a {type(content).__name__})")
    return content


def read_yaml(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML configuration. Raises UserError if it is unreadable, too large or not a mapping."""
    text = _read_text(file, YAML_BYTES)
    try:
        # Events hold the decoded values, so an escaped interpolation is found, too.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or "${" in getattr(event, "value", ""):
                raise UserError(f"{file}: a saved configuration may not contain YAML aliases or interpolations")
        content = yaml.safe_load(text)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
