"""A draft's vocabulary: the ascending list of the token ids that the draft proposes, Vd of the target's V.

Files hold it in the form of EAGLE-3 and the speculators library: d2t, int64 [Vd], where entry i of the list is the
token i + d2t[i]; and t2d, bool [V], which is true for the tokens in the list.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from longspec.errors import UserError

MAPS = ("d2t", "t2d")
"""Names of the list's tensors in a draft's state dict."""
MOST_EXTRA = 2048
"""Largest number of prompt tokens outside the list per row."""
TOTAL_EXTRA = 8192
"""Number of prompt tokens outside the list that all rows share."""
LEAST_EXTRA = 64
"""Number that a row has in any case."""


def listed_tokens(d2t: Tensor) -> Tensor:
    """The token ids of a list, LongTensor [Vd], ascending."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def vocabulary_maps(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` of ascending token ids, LongTensor [Vd]."""
    in_list = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    in_list[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens), device=tokens.device), "t2d": in_list}


def maps_problem(maps: Mapping[str, Tensor], vocab_size: int) -> str | None:
    """The reason why a draft with `maps`, its entries of MAPS, does not fit a target; None if it does. A draft without
    a list has neither entry."""
    if not maps:
        return None
    if missing := [name for name in MAPS if name not in maps]:
        return f"its vocabulary list lacks {missing[0]}"
    d2t, t2d = maps["d2t"], maps["t2d"]
    if d2t.dtype != torch.int64 or d2t.dim() != 1 or not 1 <= len(d2t) <= vocab_size:
        return f"d2t is no int64 vector of at most {vocab_size} entries"
    tokens = listed_tokens(d2t)
    # The offsets are compared first, because their sum with the index may overflow.
    if d2t.min() < 0 or d2t.max() >= vocab_size or tokens.max() >= vocab_size or (tokens.diff() <= 0).any():
        return f"the token ids of d2t are not ascending ids in 0 … {vocab_size - 1}"
    # Both tensors describe one list; files of other tools may disagree.
    if t2d.dtype != torch.bool or not torch.equal(t2d, vocabulary_maps(tokens, vocab_size)["t2d"]):
        return "d2t and t2d are different lists"
    return None


def checked_tokens(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """`tokens` as an ascending LongTensor [Vd]. Raises UserError unless they are distinct token ids of the target."""
    valid = isinstance(tokens, Sequence) and all(type(token) is int and 0 <= token < vocab_size for token in tokens)
    if not valid or not len(tokens) or len(set(tokens)) < len(tokens):
        raise UserError(f"draft_vocabulary: must be a list of distinct token ids in 0 … {vocab_size - 1}")
    return torch.tensor(sorted(tokens))


def most_frequent(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """The `size` tokens with the largest counts, LongTensor [size], ascending; of equal counts the lowest ids.

    counts: LongTensor [V]. Tokens of `always` that occur come first.
    """
    first = torch.zeros_like(counts, dtype=torch.bool)
    first[[token for token in always if 0 <= token < len(counts)]] = True
    # Tokens of `always` that occur rank above the largest count.
    rank = counts + first * (counts > 0) * (counts.max() + 1)
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def extra_columns(vocab: int, listed: int, rows: int) -> int:
    """E of a batch of `rows` rows. listed: Vd."""
    return min(MOST_EXTRA, max(LEAST_EXTRA, TOTAL_EXTRA // rows), vocab - listed)


def prompt_tokens(prompts: Tensor, lengths: Tensor, listed: Tensor, vocab: int) -> Tensor:
    """The position at which each token occurs last in a prompt, LongTensor [B, V].

    -1 for tokens that do not occur, and for those in `listed`.
    """
    positions = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    positions = positions.where(positions < lengths[:, None], -1)
    last = prompts.new_full((len(prompts), vocab), -1).scatter_reduce_(1, prompts, positions, "amax")
    return last.index_fill_(1, listed, -1)
