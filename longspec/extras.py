"""Error messages that name the extra of pyproject.toml to install when a package is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

from longspec.errors import UserError


class MissingExtra(ModuleNotFoundError, UserError):
    """A package of an extra is not installed."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import packages of the extra `name` in the block. Raises MissingExtra where one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, MissingExtra) or error.name is None or error.name.partition(".")[0] == "longspec":
            raise
        package = error.name.partition(".")[0]
        message = f"the package {package} is not installed; run: pip install 'longspec[{name}]'"
        raise MissingExtra(message, name=package) from error
