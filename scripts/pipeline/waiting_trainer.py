"""A trainer of one rank that imports all it needs at once, and begins when a line on stdin says so."""

import sys

from longspec.train.trainer import main

if __name__ == "__main__":
    if sys.stdin.readline():  # nothing, where the process that would have written it has ended
        main()
