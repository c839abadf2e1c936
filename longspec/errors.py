"""The exception for bad input, and how commands report it."""

import atexit
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from io import TextIOWrapper
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class UserError(ValueError):
    """Bad input. The message is one line that says what is wrong, where, and what to do."""


@contextmanager
def os_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn an OSError, also of a library that hides it, into a UserError: the problem, the reason in brackets, and what
    to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # torch, tokenizers and safetensors hide the errno in their messages.
        if not (isinstance(error, OSError) or "inline_container" in str(error) or "(os error " in str(error)):
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{problem} ({reason}){advice and '; '}{advice}") from error


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, to be quoted in a UserError."""
    lines = str(error).strip().splitlines()
    # A heading says nothing without the line after it.
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].strip()}"
    return lines[0] if lines else type(error).__name__


@cache
def warn_once(message: str, *values: object) -> None:
    """Log a warning that this process has not logged before. Arguments as those of `logging.Logger.warning`."""
    logger.warning(message, *values)


def reports_user_errors(main: Callable[..., T]) -> Callable[..., T]:
    """Decorator of a command's `main`, which prints a UserError as one line on stderr and exits with code 2. Characters
    that the encoding of stdout lacks are printed as escapes, as on stderr. The process ends without a last search for
    garbage, which takes over a second with torch and transformers."""

    @wraps(main)
    def wrapped(*args: object, **kwargs: object) -> T:
        if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        atexit.register(gc.freeze)
        try:
            return main(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from error

    return wrapped
