"""The trainer's command. Its arguments are parsed before torch and DeepSpeed are imported, which takes seconds."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout

from longspec.errors import reports_user_errors
from longspec.extras import extra


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Parse the launch line and run `longspec.train.trainer.main`.

    --help and a line that does not parse end every rank; rank 0 prints the message. Raises MissingExtra.
    """
    with ExitStack() as silence:
        if os.environ.get("RANK", "0") != "0":
            silence.enter_context(redirect_stdout(io.StringIO()))
            silence.enter_context(redirect_stderr(io.StringIO()))
        launch_parser().parse_intermixed_args(argv)
    with extra("train"):
        from longspec.train.trainer import main as run
    run(argv)


def launch_parser() -> argparse.ArgumentParser:
    """The parser of the launch line. It leaves the overrides to Hydra."""
    parser = argparse.ArgumentParser(description="Train a GLIDE draft for a frozen target.")
    parser.add_argument("-cp", "--config-path", default="conf/exp", help="folder of the experiments")
    parser.add_argument("-cn", "--config-name", required=True, help="experiment: a file in that folder")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in Hydra")
    return parser
