"""The trainer's command-line interface. It prints its help without importing torch and DeepSpeed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from longspec.errors import reports_user_errors
from longspec.extras import extra
from longspec.train.arguments import launch_parser


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
