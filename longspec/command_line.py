"""The argument parser of `inference_long-bench.py` and `python -m longspec.regenerate`."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from longspec.errors import UserError
from longspec.inference.token_options import COMMAND_OPTIONS


class _Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of an option, unless the text names it or there is none. Keeps line breaks of the
    examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_told = action.default in (None, ()) or action.default is False or "default:" in (action.help or "")
        return action.help if is_told else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser that reports its errors as UserError. Its help shows defaults and examples."""

    def __init__(self, examples: Sequence[str], **settings: Any) -> None:
        epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples)
        super().__init__(epilog=epilog, formatter_class=_Format, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def add_token_options(add: Callable[..., Any]) -> None:
    """Add COMMAND_OPTIONS, which are None unless they are given."""
    for name, (kind, text) in COMMAND_OPTIONS.items():
        add(f"--{name}", type=kind, help=text[0].lower() + text[1:].rstrip("."))
