"""The end of a stream, which its reader waits for."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_STREAMING: ContextVar[Any] = ContextVar("streamer", default=None)
"""The streamer that an outer call ends."""


def ends_streamer(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function with a parameter `streamer`: ends it once, also if the function raises.

    A reader in another thread would otherwise wait for ever. If one decorated function calls another with the same
    streamer, the outer one ends it.
    """
    parameters = signature(function)

    @wraps(function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            streamer = parameters.bind_partial(*args, **kwargs).arguments.get("streamer")
        except TypeError:  # the call itself will report wrong arguments
            streamer = kwargs.get("streamer")
        if not callable(getattr(streamer, "end", None)) or _STREAMING.get() is streamer:
            return function(*args, **kwargs)
        before = _STREAMING.set(streamer)
        try:
            return function(*args, **kwargs)
        finally:
            _STREAMING.reset(before)
            streamer.end()  # type: ignore[union-attr]

    return ending
