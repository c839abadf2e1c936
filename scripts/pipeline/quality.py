"""How good the target is and how honest the prompts are: bits per byte beside a bigram's, and repetition."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

DISCOUNT = 0.75


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """How many bytes each id of a byte-level vocabulary stands for, LongTensor [V]; special tokens stand for none."""
    special = set(tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if number in special else len(token) for number, token in enumerate(tokens)])


@torch.no_grad()
def target_nats(model: PreTrainedModel, rows: Tensor, batch: int = 4) -> float:
    """-log p of rows[:, 1:] given what stands before each token in its row; rows LongTensor [R, T]."""
    total = 0.0
    for part in rows.to(model.device).split(batch):
        logits = model(input_ids=part).logits[:, :-1]
        total += cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return total


def bigram_nats(train: Tensor, rows: Tensor, vocab_size: int) -> float:
    """-log p of rows[:, 1:] under a bigram with interpolated Kneser-Ney smoothing; train LongTensor [tokens]."""
    counts = torch.zeros(vocab_size, vocab_size)
    counts.index_put_((train[:-1], train[1:]), torch.ones(len(train) - 1), accumulate=True)
    # How many different tokens a token has been seen after: better than its frequency for pairs not seen before.
    unseen = (counts > 0).sum(0) + 0.5
    unseen = unseen / unseen.sum()
    before, after = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    seen = counts.sum(1)[before].clamp(min=1)
    kept = (counts[before, after] - DISCOUNT).clamp(min=0) / seen
    left = torch.where(counts.sum(1)[before] > 0, DISCOUNT * (counts > 0).sum(1)[before] / seen, 1.0)
    return -(kept + left * unseen[after]).log().sum().item()


def bits_per_byte(nats: float, rows: Tensor, byte_counts: Tensor) -> float:
    """Bits for each byte of rows[:, 1:], the tokens that were predicted."""
    return nats / math.log(2) / byte_counts[rows[:, 1:]].sum().item()


def distinct_share(outputs: Sequence[Sequence[int]], n: int = 4) -> float:
    """Different n-grams of tokens in an output over all its n-grams, pooled over the outputs."""
    grams = [[tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)] for tokens in outputs]
    total = sum(map(len, grams))
    return sum(len(set(found)) for found in grams) / total if total else math.nan
