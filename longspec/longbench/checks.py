"""Checks of the command's options that need no weights. Each raises a UserError that starts with the option's name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from longspec.command_line import drafting_of
from longspec.data.templates import check_embedded
from longspec.errors import UserError
from longspec.inference.adaptive.plan_drafters import MOST_NODES
from longspec.inference.arguments import check_draft_window
from longspec.inference.memory import check_memory
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.models.draft_files import draft_settings
from longspec.models.target_split import rank_config

if TYPE_CHECKING:
    from longspec.longbench.plan import EvaluationPlan

INT64_LIMIT = 2**63
"""Seeds are below this value, so that they fit into a LongTensor."""


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for a number outside its range. `inference.arguments` checks those that `generate` takes."""
    least = {"test_length": 0, "batch_size": 1, "tp_size": 1, "min_prompt_len": 0, "headroom": 0, "seed": 0}
    for name, number in least.items():
        if getattr(options, name) < number:
            raise UserError(f"--{name}: {getattr(options, name)}; it must be at least {number}")
    if options.seed >= INT64_LIMIT:
        raise UserError(f"--seed: {options.seed}; it must be less than {INT64_LIMIT}")


def check_draft_settings(options: argparse.Namespace, draft: str) -> None:
    """Raise UserError if the draft is untrained but the method needs it, or if its window is too small."""
    settings = draft_settings(draft)
    if options.method in GLIDE_METHODS and not settings.is_trained:
        raise UserError(
            f"--draft: {draft} was saved with a fresh, untrained draft; give a trained one, or use --method lookup"
        )
    check_draft_window(drafting_of(options), settings.options.window)


def check_batch_memory(plan: EvaluationPlan) -> None:
    """Raise UserError if a lower bound of the memory for the longest row exceeds that of the device."""
    options, prompts, config = plan.options, plan.selection.prompts, plan.config
    largest_tree = sum(options.tree_shape)
    if options.tree_nodes is not None:
        largest_tree = min(largest_tree, options.tree_nodes - 1)
    draft_tokens = {"vanilla": 0, "tree": largest_tree, AUTO: max(MOST_NODES - 1, options.gamma)}.get(
        options.method, options.gamma
    )
    longest = max(len(prompt.token_ids) for prompt in prompts) + plan.max_new_tokens
    if options.tp_size > 1:
        config = rank_config(config, 0, options.tp_size)
    state = plan.state_in_use or {}
    listed = state["d2t"].numel() if "d2t" in state else None  # length of the draft's vocabulary list
    # One more than the draft tokens: the root is verified, too.
    check_memory(config, plan.dtype, plan.device, longest, draft_tokens + 1, listed)


def check_prompts(plan: EvaluationPlan) -> None:
    """Raise UserError for a prompt that leaves no room for its answer or has a token without an embedding."""
    for prompt in plan.selection.prompts:
        length = len(prompt.token_ids)
        if length + plan.max_new_tokens > plan.max_positions:
            raise UserError(
                f"sample {prompt.id!r}: prompt of {length} tokens + {plan.max_new_tokens} new tokens (--max_gen_len) "
                f"are more than the target's {plan.max_positions} positions"
            )
        # It would end a GPU run with a device-side assert.
        check_embedded(prompt.token_ids, plan.config.vocab_size, plan.tokenizer, f"sample {prompt.id!r}")
