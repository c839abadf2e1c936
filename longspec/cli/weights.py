"""The commands `longspec extract` and `longspec split`, which convert weight files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longspec.extras import extra


def extract(
    checkpoint: Annotated[Path, typer.Argument(help="Folder last_ds or last_2ds of a run.")],
    output: Annotated[Path, typer.Argument(help="File .pth or folder to write.")],
    hf: Annotated[bool, typer.Option("--hf", help="Write a folder in Hugging Face format.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Store matrices in 8 bits; only with --hf.")] = False,
) -> None:
    """Extract the draft from a DeepSpeed checkpoint."""
    with extra("train"):
        from longspec.train.extraction import extract_draft

    print(f"{extract_draft(checkpoint, output, hf, int8)} weights of {checkpoint} written to {output}")


def split(
    target: Annotated[str, typer.Option("--target", help="Target: name, folder, hub id or .gguf file.")],
    tp_size: Annotated[int, typer.Option("--tp_size", min=2, help="Number of ranks that share the target.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to write; it must not exist.")],
) -> None:
    """Split a target into a folder per rank, for training and decoding with `tp_size`."""
    from longspec.inference.registry import choose_target
    from longspec.models.target_files import local_target
    from longspec.models.target_split import split_target

    split_target(local_target(choose_target(target)), output, tp_size)
    print(f"{target} for {tp_size} ranks written to {output}")
