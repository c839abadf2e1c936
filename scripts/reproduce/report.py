"""Placeholder until the measuring half is there."""

from pathlib import Path

from scripts.reproduce.run import Run


def report(folder: Path, run: Run) -> None:
    raise NotImplementedError
