"""A trainer of one rank that loads all it needs at once, and takes its first step when it is told to.

Its stdin is a socket (`machine.run` with a turn): it writes a byte when all is loaded, and waits for a line.
"""

import os
import sys

from longspec.train.run import main


def await_turn() -> None:
    """Return when the line comes. Raises SystemExit where the process that would have written it has ended."""
    os.write(sys.stdin.fileno(), b".")
    if not sys.stdin.readline():
        raise SystemExit("not told to begin: whoever started this has ended")


if __name__ == "__main__":
    main(before_steps=await_turn)
