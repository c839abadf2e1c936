"""Checks of the command's options that need no weights. Each raises a UserError that starts with the option's name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_draft_window
from longspec.inference.memory import check_memory
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.tasks import Sample
from longspec.inference.tree_shapes import CANDIDATES
from longspec.models.draft_files import draft_settings

SEED_LIMIT = 2**63
"""torch takes seeds below it, with room for the batch numbers that are added."""


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for a number outside its range; `arguments` checks those of `generate`."""
    for name, least in (("test_length", 0), ("batch_size", 1), ("min_prompt_len", 0), ("headroom", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name}: {getattr(options, name)}; it must be at least {least}")
    for name, limit in (("seed", SEED_LIMIT), ("top_k", SEED_LIMIT)):
        if getattr(options, name) >= limit:
            raise UserError(f"--{name}: {getattr(options, name)}; it must be less than {limit}")


def check_output(folder: str | None) -> None:
    """Raise UserError if the output folder surely cannot be created or written; nothing is created yet."""
    path = Path(folder or ".").absolute()
    try:
        existing = next(part for part in (path, *path.parents) if part.exists())
    except OSError as error:
        raise UserError(f"--output_dir: {folder}: {error.strerror}; give a folder") from error
    if not existing.is_dir():
        raise UserError(f"--output_dir: {folder}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--output_dir: {folder}: {existing} cannot be written; give another folder")


def check_draft_settings(options: argparse.Namespace, draft: str) -> None:
    """Raise UserError if the method drafts with a saved draft that is untrained or has too small a window."""
    settings = draft_settings(draft)
    if options.method in GLIDE_METHODS and not settings.is_trained:
        raise UserError(
            f"--draft: {draft} was saved with a fresh, untrained draft; give a trained one, or use --method lookup"
        )
    check_draft_window(options.method, options.tree_shape, options.gamma, settings.options.window)


def check_batch_memory(
    options: argparse.Namespace,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    samples: Sequence[Sample],
    max_new_tokens: int,
) -> None:
    """Raise UserError if the largest batch surely does not fit into the device's memory."""
    shapes = CANDIDATES if options.tree_shape == AUTO else (options.tree_shape,)
    drafted = {"vanilla": 0, "tree": max(map(sum, shapes))}.get(options.method, options.gamma)
    longest = max(len(sample.token_ids) for sample in samples)
    rows = min(options.batch_size, len(samples))
    check_memory(config, dtype, device, rows, longest + max_new_tokens, drafted + 1)


def check_samples(samples: Sequence[Sample], max_new_tokens: int, window: int, vocab_size: int) -> None:
    """Every prompt must be made of the target's tokens and leave room for its answer."""
    for sample in samples:
        length, highest = len(sample.token_ids), max(sample.token_ids)
        if length + max_new_tokens > window:
            raise UserError(
                f"sample {sample.id!r}: prompt of {length} tokens + {max_new_tokens} new tokens (--max_gen_len) "
                f"are more than the target's {window} positions"
            )
        if highest >= vocab_size:
            raise UserError(
                f"sample {sample.id!r}: token id {highest}, the target has {vocab_size} embeddings; "
                "this tokenizer is not the target's"
            )
