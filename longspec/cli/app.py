"""The command `longspec`. torch is not imported before a command needs it, so help and completion are fast."""

import errno
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

import longspec
from longspec.cli.bench import bench
from longspec.cli.chat import chat
from longspec.cli.generate import generate
from longspec.cli.serve import serve
from longspec.cli.train import train
from longspec.errors import UserError, reports_user_errors
from longspec.extras import extra
from longspec.signals import StopSignals


def extract(
    checkpoint: Annotated[Path, typer.Argument(help="Folder last_ds or last_2ds of a run.")],
    output: Annotated[Path, typer.Argument(help="File .pth or folder to write.")],
    hf: Annotated[bool, typer.Option("--hf", help="Write a folder in Hugging Face format.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Store matrices in 8 bits; only with --hf.")] = False,
) -> None:
    """Extract the draft from a DeepSpeed checkpoint."""
    with extra("train"):
        from longspec.train.checkpoint import extract_draft

    print(f"{extract_draft(checkpoint, output, hf, int8)} weights of {checkpoint} written to {output}")


def split(
    target: Annotated[str, typer.Option("--target", help="Target: name, folder, hub id or .gguf file.")],
    tp_size: Annotated[int, typer.Option("--tp_size", min=2, help="Number of ranks that share the target.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; it must not exist.")],
) -> None:
    """Split a target into a folder per rank, for training and decoding with `tp_size`."""
    from longspec.inference.registry import choose_pair
    from longspec.models.target_files import local_target
    from longspec.models.target_split import split_target

    split_target(local_target(choose_pair(target).target), output, tp_size)
    print(f"{target} for {tp_size} ranks written to {output}")


PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings that leave every option, --help included, to the command's own parser."""


def passed_on(module: str) -> Callable[[typer.Context], None]:
    """A command that leaves its arguments to the `main` of a module, which has a parser of its own."""

    def run(context: typer.Context) -> None:
        importlib.import_module(module).main(context.args, prog=f"longspec {context.info_name}")

    return run


UsageError: Any = typer.BadParameter.__base__  # typer exports no name for it


app = typer.Typer(
    name="longspec",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"longspec {longspec.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: `longspec generate 'Why is the sky blue?'`")
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding for long contexts."""


USE = "Use a pair"
TRAIN = "Train and prepare a draft"
OWN: dict[Callable[..., None], tuple[str, str]] = {
    chat: (USE, "longspec chat Qwen/Qwen2.5-0.5B-Instruct --temperature 0.7"),
    generate: (USE, "longspec generate prompts.jsonl --output answers.jsonl --batch_size 16"),
    serve: (USE, "longspec serve llama8b --port 9000 --max_rows 32"),
    bench: (USE, "longspec bench llama8b --prompts prompts.txt --png speed.png"),
    train: (TRAIN, "longspec train your-model model_name_or_path=TARGET 'data.files=[data/train.jsonl]'"),
    extract: (TRAIN, "longspec extract outputs/RUN/last_ds drafts/mine --hf"),
    split: (TRAIN, "longspec split --target Qwen/QwQ-32B-Preview --tp_size 2 --output targets/qwq-tp2"),
}
"""The panel of each command in the help, and an example."""
OTHERS = {
    "evaluate": ("longspec.longbench.command", USE, "Measure a pair on LongBench tasks and AIME24"),
    "draft": ("longspec.pipeline.command", TRAIN, "Train a draft for any target and measure it, in one command"),
    "regenerate": ("longspec.regenerate.command", TRAIN, "Write training text with the target"),
}
"""Commands with a parser of their own: its module, their panel in the help, and their help."""
for function, (panel, example) in OWN.items():
    app.command(rich_help_panel=panel, epilog=f"Example: `{example}`")(function)
for name, (module, panel, text) in OTHERS.items():
    text = f"{text} (`longspec {name} --help`)."
    app.command(name, help=text, rich_help_panel=panel, context_settings=PASSED_ON)(passed_on(module))


@reports_user_errors
def main() -> None:
    """Run the command line. A stop signal ends a command with 128 + its number, after its current work is saved."""
    sys.stdin = sys.stdin or TextIOWrapper(BytesIO())  # None if the caller closed it
    with StopSignals(at_once=True, note=""):
        try:
            status = app(sys.argv[1:] or ["--help"], prog_name="longspec", standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
            sys.exit(status)
        except UsageError as error:
            message = " ".join(error.format_message().split()).rstrip(".")
            raise UserError(f"{message[:1].lower()}{message[1:]} (see --help)") from error
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC) or sys.stdout is None:
                raise
            with suppress(OSError):
                sys.stdout.flush()  # complete, unless it is the output that failed
            # What is left in the buffer would fail again at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:  # the reader of the output closed it, as `head` does
                raise SystemExit(1) from None
            raise UserError(f"the output or a file cannot be written ({error.strerror})") from error
