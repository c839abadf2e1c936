"""The trainer's command and its launch line. Help is printed without importing torch and DeepSpeed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from longspec.errors import reports_user_errors
from longspec.extras import extra


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `longspec.train.trainer.main`, or print the help on rank 0. Raises MissingExtra."""
    arguments = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"}.isdisjoint(arguments):
        if os.environ.get("RANK", "0") == "0":
            launch_parser().print_help()
        return
    with extra("train"):
        from longspec.train.trainer import main as run
    run(arguments)


def launch_parser() -> argparse.ArgumentParser:
    """The parser of the launch line. It leaves the overrides to Hydra."""
    parser = argparse.ArgumentParser(description="Train a GLIDE draft for a frozen target.")
    parser.add_argument("-cp", "--config-path", default="conf/exp", help="folder of the experiments")
    parser.add_argument("-cn", "--config-name", required=True, help="experiment: a file in that folder")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in Hydra")
    return parser
