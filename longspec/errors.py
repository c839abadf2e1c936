"""The one exception for bad input, and how the commands show it."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """Bad input: one line that says what is wrong, where, and what to do."""


def first_line(error: BaseException) -> str:
    """What an error of another library says, short enough to stand inside a UserError."""
    lines = str(error).strip().splitlines()
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0] if lines else type(error).__name__


def reports_user_errors(main: Callable[..., T]) -> Callable[..., T]:
    """Make a command's `main` print a UserError as one line on stderr and exit with code 2."""

    @wraps(main)
    def wrapped(*args: object, **kwargs: object) -> T:
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error

    return wrapped
