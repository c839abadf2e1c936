"""Calls that a test notes on their way to what is called."""

from collections.abc import Callable
from typing import Any

import pytest


def noted(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any], notes: list[Any] | None = None
) -> list[Any]:
    """Before each call of `owner.name`, append what `note` makes of its arguments to `notes`, which is returned."""
    real, kept = getattr(owner, name), [] if notes is None else notes

    def noting(*arguments: Any, **options: Any) -> Any:
        kept.append(note(*arguments, **options))
        return real(*arguments, **options)

    patch.setattr(owner, name, noting)
    return kept
