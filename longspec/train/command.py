"""The trainer's command-line interface. It prints its help without importing torch and DeepSpeed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from longspec.errors import reports_user_errors
from longspec.extras import extra


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Train, or print the help on rank 0. Raises MissingExtra if the extra `train` is not installed."""
    arguments = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"}.isdisjoint(arguments):
        if os.environ.get("RANK", "0") == "0":
            launch_parser().print_help()
        return
    with extra("train"):
        from longspec.train.run import main as run
    run(arguments)


def launch_parser() -> argparse.ArgumentParser:
    """The parser of the trainer's arguments. Overrides are left to Hydra."""
    parser = argparse.ArgumentParser(description="Train a GLIDE draft for a frozen target.")
    parser.add_argument("-cp", "--config-path", default="conf/exp", help="folder with the experiments")
    parser.add_argument("-cn", "--config-name", required=True, help="experiment, a file in this folder")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the composed configuration and exit")
    # The launcher adds this argument.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the configuration, as in Hydra")
    return parser
