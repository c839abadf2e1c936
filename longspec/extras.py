"""Errors for missing optional packages, which name the extra to install."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from longspec.errors import UserError


class MissingExtra(ModuleNotFoundError, UserError):
    """An optional package is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Context for imports from the extra `name` of pyproject.toml. Raises MissingExtra if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug, not a missing extra.
        if isinstance(error, MissingExtra) or error.name is None or error.name.partition(".")[0] == "longspec":
            raise
        package = error.name.partition(".")[0]
        message = f"the package {package} is not installed; run: pip install 'longspec[{name}]'"
        raise MissingExtra(message, name=package) from error


@contextmanager
def demo_extra() -> Iterator[None]:
    """`extra("demo")` for programs that train: DeepSpeed uses the CPU if there is no GPU, without a warning."""
    with extra("demo"):
        import torch

        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        yield
