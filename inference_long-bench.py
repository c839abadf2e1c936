"""Measure a target, alone or with its draft, on LongBench tasks and AIME24; see `--help`."""

from longspec.inference.command import main

if __name__ == "__main__":
    main()
