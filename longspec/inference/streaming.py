"""Streamers receive tokens as they are decoded, and are ended once, because their readers wait for the end."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, Protocol, TypeVar

from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Streamer(Protocol):
    """transformers' streamer interface, with an optional third method. If a streamer has `put_from(value: Tensor,
    origin: Origin) -> None`, it receives the new tokens through it, and only the prompt through `put`."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def ends_streamer(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator of a function with a parameter `streamer`: ends it once, also if the function raises. A reader in
    another thread would otherwise wait for ever. One decorated function calls another by its `__wrapped__`."""
    position = list(signature(function).parameters).index("streamer")

    @wraps(function)
    def ending(*args: P.args, **kwargs: P.kwargs) -> T:
        streamer = kwargs.get("streamer", args[position] if len(args) > position else None)
        try:
            return function(*args, **kwargs)
        finally:
            if callable(end := getattr(streamer, "end", None)):
                end()

    return ending
