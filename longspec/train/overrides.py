"""Overrides of the configuration as users type them, in Hydra's syntax."""

import re
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

ELEMENT = re.compile(r"""\s*('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,]*?)\s*(?:,|$)""")
"""An element of a list without nested lists: quoted text, or anything up to a comma."""


def readable(override: str) -> str:
    """`override`, with the values quoted that Hydra does not read, such as paths with = ' [ ] ( ) or ü."""
    key, equals, value = override.partition("=")
    if not equals or _parsed(override) is not None:
        return override
    if value.startswith("[") and value.endswith("]"):
        elements = [element for element in ELEMENT.findall(value[1:-1]) if element]
        return f"{key}=[{','.join(_readable_value(element) for element in elements)}]"
    return f"{key}={_quoted(value)}"


def _readable_value(value: str) -> str:
    return _quoted(value) if _parsed(f"key={value}") is None else value


def _parsed(override: str) -> Override | None:
    """Hydra's reading of an override; None if it has none, or one for several runs, as of a path with a comma."""
    parser: Any = OverridesParser.create()
    try:
        parsed = parser.parse_override(override)
    except HydraException:
        return None
    return None if parsed.is_choice_sweep() else parsed


def _quoted(text: str) -> str:
    # Hydra reads a backslash as itself, unless a quote or the end follows.
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"
