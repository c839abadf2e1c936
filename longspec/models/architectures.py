"""The draft architectures by name. GLIDE's class depends on the target's family; no other module lists the others."""

from collections.abc import Mapping
from typing import Any

from longspec.errors import UserError
from longspec.models.draft import Draft
from longspec.models.draft_layer import GLIDE, GlideDecoderLayer
from longspec.models.eagle3 import Eagle3Draft

_classes: dict[str, type[Draft]] = {"eagle3": Eagle3Draft}


def add_architecture(draft: type[Draft]) -> None:
    """Make a draft class known under its architecture's name. Raises UserError for a name that exists."""
    if (name := draft.options_class.architecture) in architectures():
        raise UserError(f"register_draft: there is an architecture {name!r}; choose another name")
    _classes[name] = draft


def architectures() -> tuple[str, ...]:
    """The names of all architectures."""
    return (GLIDE, *_classes)


def draft_class(name: str, glide: type[GlideDecoderLayer], source: str = "architecture") -> type[Draft]:
    """The draft class of an architecture. glide: that of the target's family. source: precedes the name in errors.
    Raises UserError for an unknown name."""
    if name == GLIDE:
        return glide
    if name not in _classes:
        known = ", ".join(architectures())
        raise UserError(f"{source}: no draft architecture {name!r}; use one of {known}, or register it first")
    return _classes[name]


def published_draft(config: Mapping[str, Any]) -> type[Draft] | None:
    """The architecture whose published form a draft's `config.json` has; None for any other file."""
    names = config.get("architectures")
    names = set(map(str, names)) if isinstance(names, list) else set()
    return next((draft for draft in _classes.values() if names & set(draft.published_names)), None)
