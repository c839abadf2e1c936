"""The settings of a run, their checks, and the seeds that follow from them."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from longspec.command_line import drafting_of
from longspec.data.target_format import AUTO
from longspec.errors import UserError
from longspec.inference.arguments import check_drafting, check_sampling
from longspec.inference.methods import DEFAULT_GAMMA, DEFAULT_SHAPE, TREE_RULES
from longspec.inference.request import FILTERS
from longspec.inference.token_options import check_integer, token_settings, with_word_ids

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Settings:
    """The text that a run writes. The same settings give the same files on the same kind of device."""

    target: str
    """Name that `load_pair` takes, folder, hub id or GGUF file."""
    output_dir: str
    """Folder of the split's file and its shards."""
    split: str = "train"
    """One of SPLITS. Each split has its own random numbers."""
    files: tuple[str, ...] = ()
    """JSONL files, folders or patterns with prompts. Without any, the target writes the user turns."""
    count: int = 0
    """Number of prompts in all shards. With files, their first `count` records; 0 takes all."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Temperatures to draw from, for each answer."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    token_options: Mapping[str, Any] | None = None
    """Entries of `token_options.COMMAND_OPTIONS`; those of the target's generation config do not apply."""
    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    max_prompt_tokens: int = 0
    """Longest prompt, in tokens; longer ones are left out. 0 keeps all that leave room for max_new_tokens."""
    max_turn_tokens: int = 256
    """Longest user turn that the target writes, in tokens. A longer one ends with its last complete sentence or line.
    """
    batch_size: int = 256
    """Largest number of rows in a batch."""
    shard_size: int = 0
    """Number of prompts per shard; 0 lets `shards.shard_size` choose it."""
    seed: int = 0
    chat_format: str = AUTO
    chat_template_kwargs: str | None = None
    """Variables of the tokenizer's chat template, as a JSON object."""
    exclude: tuple[str, ...] = ()
    """Files of other splits, whose prompts are left out."""
    method: str = "vanilla"
    """How tokens are proposed; the next options are those of `longspec.generate`."""
    tree_shape: tuple[int, ...] = DEFAULT_SHAPE
    gamma: int = DEFAULT_GAMMA
    tree_rule: str = TREE_RULES[0]
    tree_nodes: int | None = None
    lookup_branches: bool = False
    draft: str | None = None
    """A .pth file, a folder or a hub id; None takes the pair's own."""

    @property
    def filters(self) -> dict[str, Any]:
        """The fields of `Sampling` that are FILTERS."""
        return {name: getattr(self, name) for name in FILTERS}

    def penalties(self, tokenizer: Any, vocab: int, stop_ids: Collection[int] = ()) -> dict[str, Any]:
        """The fields of `Sampling` that follow from `token_options`, for texts that end with stop_ids. Raises
        UserError."""
        return token_settings(with_word_ids(self.token_options or {}, tokenizer), stop_ids, vocab)


def check_settings(settings: Settings) -> None:
    """Raise UserError for a value outside its range."""
    if settings.split not in SPLITS:
        raise UserError(f"split: {settings.split!r}; use one of {', '.join(SPLITS)}")
    if not settings.files and settings.count < 1:
        raise UserError("count: give the number of prompts to write, at least 1, or files with prompts")
    if not settings.temperatures:
        raise UserError("temperatures: none; give numbers of 0 (greedy) or more")
    for temperature in settings.temperatures:
        check_sampling(settings.max_new_tokens, temperature, **settings.filters)
    check_drafting(drafting_of(settings))
    least = {"max_turn_tokens": 1, "batch_size": 1, "count": 0, "max_prompt_tokens": 0, "shard_size": 0, "seed": 0}
    for name, number in least.items():
        check_integer(name, getattr(settings, name), number)


def longest_prompt(settings: Settings, positions: int) -> int:
    """Most tokens of a prompt. positions: those of the target. Raises UserError for limits beyond them."""
    room = positions - settings.max_new_tokens
    if room < 1:
        raise UserError(f"max_new_tokens: {settings.max_new_tokens}; the target has {positions} positions")
    if settings.max_prompt_tokens > room:
        raise UserError(
            f"max_prompt_tokens {settings.max_prompt_tokens} + max_new_tokens {settings.max_new_tokens}: "
            f"the target has {positions} positions"
        )
    return settings.max_prompt_tokens or room


def shard_seed(settings: Settings, shard: int, use: str) -> int:
    """The seed of a shard for one use of random numbers. Splits, shards and uses never share a seed."""
    # A hash, because sums of seed and shard would collide between runs with nearby seeds.
    name = f"{settings.seed}/{settings.split}/{shard}/{use}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
