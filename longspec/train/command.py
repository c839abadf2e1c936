"""The trainer's command-line interface. It prints its help without importing torch and DeepSpeed."""

import sys
from collections.abc import Sequence

from longspec.errors import reports_user_errors
from longspec.extras import extra
from longspec.signals import is_first_rank
from longspec.train.arguments import launch_parser


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Train, or print the help on rank 0. Raises MissingExtra if the extra `train` is not installed."""
    arguments = sys.argv[1:] if argv is None else argv
    if not {"-h", "--help"}.isdisjoint(arguments):
        if is_first_rank():
            launch_parser().print_help()
        return
    with extra("train"):
        from longspec.train.run import main as run
    run(arguments)
