"""Imports of optional packages, and errors for missing ones, which name the extra to install."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from longspec.errors import UserError


class MissingExtra(ModuleNotFoundError, UserError):
    """An optional package is not installed."""


@cache
def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported."""
    return importlib.util.find_spec(module) is not None


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Context for imports from the extra `name` of pyproject.toml. Raises MissingExtra if a package is missing."""
    # Imports create a million objects that stay; looking for garbage among them takes a fifth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug, not a missing extra.
        if isinstance(error, MissingExtra) or error.name is None or error.name.partition(".")[0] == "longspec":
            raise
        package = error.name.partition(".")[0]
        message = f"the package {package} is not installed; run: pip install 'longspec[{name}]'"
        raise MissingExtra(message, name=package) from error
    finally:
        if collects:
            gc.enable()


@contextmanager
def demo_extra() -> Iterator[None]:
    """`extra("demo")` for programs that train: DeepSpeed uses the CPU if there is no GPU, without a warning."""
    with extra("demo"):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        yield
