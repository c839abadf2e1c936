"""A trainer of one rank that loads all it needs at once, and takes its first step when a line on stdin says so."""

import sys

from longspec.train.trainer import main


def await_line() -> None:
    """Return when a line comes. Raises SystemExit where the process that would have written it has ended."""
    if not sys.stdin.readline():
        raise SystemExit("not told to begin: whoever started this has ended")


if __name__ == "__main__":
    main(before_steps=await_line)
