"""Checks of the command's options that need no weights. Each raises a UserError that starts with the option's name."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspec.command_line import drafting_of
from longspec.data.templates import check_embedded
from longspec.errors import UserError
from longspec.inference.adaptive.plan_drafters import MOST_NODES
from longspec.inference.arguments import check_draft_window
from longspec.inference.memory import check_memory
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.longbench.prompts import TaskPrompt
from longspec.models.draft_files import draft_settings
from longspec.models.target_split import rank_config

INT64_LIMIT = 2**63
"""Seeds and top_k are below this value, so that they fit into a LongTensor."""


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for a number outside its range. `inference.arguments` checks those that `generate` takes."""
    least = {"test_length": 0, "batch_size": 1, "tp_size": 1, "min_prompt_len": 0, "headroom": 0, "seed": 0}
    for name, number in least.items():
        if getattr(options, name) < number:
            raise UserError(f"--{name}: {getattr(options, name)}; it must be at least {number}")
    for name in ("seed", "top_k"):
        if getattr(options, name) >= INT64_LIMIT:
            raise UserError(f"--{name}: {getattr(options, name)}; it must be less than {INT64_LIMIT}")


def check_draft_settings(options: argparse.Namespace, draft: str) -> None:
    """Raise UserError if the draft is untrained but the method needs it, or if its window is too small."""
    settings = draft_settings(draft)
    if options.method in GLIDE_METHODS and not settings.is_trained:
        raise UserError(
            f"--draft: {draft} was saved with a fresh, untrained draft; give a trained one, or use --method lookup"
        )
    check_draft_window(drafting_of(options), settings.options.window)


def check_batch_memory(
    options: argparse.Namespace,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    prompts: Sequence[TaskPrompt],
    max_new_tokens: int,
    listed: int | None,
) -> None:
    """Raise UserError if a lower bound of the largest batch's memory exceeds that of the device.

    listed: length of the vocabulary list of the draft in use; None without one.
    """
    largest_tree = sum(options.tree_shape)
    if options.tree_nodes is not None:
        largest_tree = min(largest_tree, options.tree_nodes - 1)
    draft_tokens = {"vanilla": 0, "tree": largest_tree, AUTO: max(MOST_NODES - 1, options.gamma)}.get(
        options.method, options.gamma
    )
    # All rows of a batch have the cache of the longest one.
    longest = max(len(prompt.token_ids) for prompt in prompts)
    rows = min(options.batch_size, len(prompts))
    if options.tp_size > 1:
        config = rank_config(config, 0, options.tp_size)
    # One more than the draft tokens: the root is verified, too.
    check_memory(config, dtype, device, rows, longest + max_new_tokens, draft_tokens + 1, listed)


def check_prompts(
    prompts: Sequence[TaskPrompt], max_new_tokens: int, max_positions: int, vocab_size: int, tokenizer: Any
) -> None:
    """Raise UserError for a prompt that leaves no room for its answer or has a token without an embedding."""
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length + max_new_tokens > max_positions:
            raise UserError(
                f"sample {prompt.id!r}: prompt of {length} tokens + {max_new_tokens} new tokens (--max_gen_len) "
                f"are more than the target's {max_positions} positions"
            )
        # It would end a GPU run with a device-side assert.
        check_embedded(prompt.token_ids, vocab_size, tokenizer, f"sample {prompt.id!r}")
