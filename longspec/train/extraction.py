"""Extraction of the draft from a training checkpoint, in one process and without the target."""

from __future__ import annotations

from pathlib import Path

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME
from longspec.models.draft_saving import save_draft_file, save_draft_folder
from longspec.models.target_cache import resolve_target
from longspec.models.target_files import read_config
from longspec.train.checkpoint import read_draft, saved_target
from longspec.train.config import CONFIG_NAME, read_config_file


def extract_draft(checkpoint: Path, output: Path, hf: bool = False, int8: bool = False) -> int:
    """Write the draft in a run's `last_ds` or `last_2ds` folder. Returns the number of its parameters.

    output: a .pth file, a folder for DRAFT_WEIGHTS_NAME, or with `hf` a folder in Hugging Face form, with `int8`
    in 8 bits. Raises UserError for a damaged checkpoint, and for `int8` without `hf`.
    """
    if int8 and not hf:
        raise UserError("--int8: only with --hf")
    draft = read_draft(checkpoint)
    run, sample = read_config_file(checkpoint / CONFIG_NAME), saved_target(checkpoint)
    if hf:
        target = read_config(resolve_target(run.model_name_or_path))
        save_draft_folder(draft, target, output, run.model.draft_options, target=sample, int8=int8)
    else:
        file = output if output.suffix == ".pth" else output / DRAFT_WEIGHTS_NAME
        save_draft_file(draft, file, run.model.draft_options, sample)
    return len(draft)
