"""`longspec evaluate` and `longspec regenerate`, which pass all arguments on to the parsers of these commands."""

from __future__ import annotations

from typing import Any

import typer

PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings that leave every option, --help included, to the command's own parser."""


def evaluate(context: typer.Context) -> None:
    """Measure a pair on LongBench tasks and AIME24 (`longspec evaluate --help`)."""
    from longspec.longbench.command import main

    main(context.args, prog="longspec evaluate")


def regenerate(context: typer.Context) -> None:
    """Write training text with the target (`longspec regenerate --help`)."""
    from longspec.regenerate.command import main

    main(context.args, prog="longspec regenerate")


def draft(context: typer.Context) -> None:
    """Train a draft for any target and measure it, in one command (`longspec draft --help`)."""
    from longspec.pipeline.command import main

    main(context.args, prog="longspec draft")
