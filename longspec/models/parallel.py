"""Tensor parallelism for targets: fairscale's model-parallel groups around transformers' own modules.

Each rank holds the heads, MLP columns and vocabulary rows that `target_split` assigned to it, in modules of that size.
Partial sums are all-reduced after the embedding, each attention and each MLP. The target is frozen, so these sums need
no backward. Without a model-parallel group every function here returns its input.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.models.target_split import rank_folder, vocabulary_rows


def model_parallel_rank_and_size() -> tuple[int, int]:
    """This process's (rank, world size) in fairscale's model-parallel group; (0, 1) without one."""
    groups = _groups()
    if groups is None or not dist.is_initialized() or not groups.model_parallel_is_initialized():
        return 0, 1
    return groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()


def _groups() -> Any:
    """The module that holds fairscale's groups; None if nothing has imported it, because then no group exists."""
    return sys.modules.get("fairscale.nn.model_parallel.initialize")


def _reduce(partial: Tensor) -> Tensor:
    """`partial` summed over the ranks."""
    from fairscale.nn.model_parallel.mappings import reduce_from_model_parallel_region

    return reduce_from_model_parallel_region(partial)


def _gather(part: Tensor) -> Tensor:
    """The parts [..., n] of all ranks, concatenated along the last dimension.

    The backward pass returns to each rank the gradient of its own part.
    """
    from fairscale.nn.model_parallel.mappings import gather_from_model_parallel_region

    return gather_from_model_parallel_region(part)


class PretrainedModelParallelPreSplitMixin:
    """Loads a target from `path`, or with tensor parallelism this rank's part from `path/mp_{rank}-of-{world}/`."""

    @staticmethod
    def shard_path(path: str | Path) -> str:
        """The folder (or hub id) this rank loads: `path` itself when tensor parallelism is off."""
        rank, world = model_parallel_rank_and_size()
        return str(path) if world == 1 else str(Path(path) / rank_folder(rank, world))


class VocabularyEmbedding(nn.Module):
    """The embedding of a split vocabulary: row i of `weight` [rows, hidden] belongs to token `first` + i."""

    def __init__(self, weight: nn.Parameter, first: int) -> None:
        super().__init__()
        self.weight, self.first = weight, first

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens Long [B, T], the same on all ranks -> embeddings [B, T, hidden], the same on all ranks."""
        rows = tokens - self.first
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        # Tokens of other ranks read row 0 and then count as zeros in the sum.
        embeddings = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return _reduce(embeddings.masked_fill(elsewhere[..., None], 0))


class VocabularyHead(nn.Module):
    """The lm_head of a split vocabulary of `size` tokens: row i of `weight` [rows, hidden] scores token `first` + i.

    A call returns the logits of the whole vocabulary. The training losses use `weight` directly and never need them.
    """

    def __init__(self, weight: nn.Parameter, first: int, size: int) -> None:
        super().__init__()
        self.weight, self.first, self.size = weight, first, size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., size]"""
        logits = F.linear(hidden, self.weight)
        most = len(vocabulary_rows(self.size, 0, model_parallel_rank_and_size()[1]))
        padded = F.pad(logits, (0, most - len(self.weight)))  # only the last rank has fewer
        return _gather(padded)[..., : self.size]


def first_token(lm_head: nn.Module) -> int:
    """Token id of the first row of this rank's head."""
    return lm_head.first if isinstance(lm_head, VocabularyHead) else 0


def vocabulary_size(lm_head: nn.Module) -> int:
    """Vocabulary size V, over all ranks."""
    return lm_head.size if isinstance(lm_head, VocabularyHead) else lm_head.out_features  # type: ignore[return-value]


def head_rows(lm_head: nn.Module, tokens: Tensor) -> Tensor:
    """The rows [..., hidden] of the head for tokens, LongTensor [...], the same on all ranks."""
    if isinstance(lm_head, VocabularyHead):
        return VocabularyEmbedding(lm_head.weight, lm_head.first)(tokens)
    return F.embedding(tokens, lm_head.weight)  # type: ignore[arg-type]


def join_ranks(target: Any, vocab_size: int) -> None:
    """Connect this rank's part of a target with those of the other ranks, so that each computes the whole target.

    target: a …ForCausalLM of this rank's sizes. vocab_size: that of the whole target.
    """
    rank, world = model_parallel_rank_and_size()
    # The modules stay transformers' own; only embedding, head and two sums per layer differ.
    first = vocabulary_rows(vocab_size, rank, world).start
    target.model.embed_tokens = VocabularyEmbedding(target.model.embed_tokens.weight, first)
    target.lm_head = VocabularyHead(target.lm_head.weight, first, vocab_size)
    for layer in target.model.layers:
        for partial in (layer.self_attn.o_proj, layer.mlp.down_proj):
            partial.register_forward_hook(lambda module, inputs, output: _reduce(output))


def gather_heads(heads: Tensor) -> Tensor:
    """The KV heads of all ranks [B, K, T, D] from those of this rank [B, K / world, T, D]."""
    if model_parallel_rank_and_size()[1] == 1:
        return heads
    # Heads become the last dimension, along which parts are concatenated: [B, T, K · D].
    whole = _gather(heads.transpose(1, 2).flatten(2))
    return whole.unflatten(2, (-1, heads.shape[-1])).transpose(1, 2)


def sum_over_ranks(partial: Tensor) -> Tensor:
    """`partial` summed over the ranks that share a target, in place."""
    if model_parallel_rank_and_size()[1] > 1:
        dist.all_reduce(partial, group=_groups().get_model_parallel_group())
    return partial


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum of `values` over the ranks that share a target, in place."""
    if model_parallel_rank_and_size()[1] > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, _groups().get_model_parallel_group())
    return values


def log_sum_exp_over_ranks(partial: Tensor) -> Tensor:
    """The log-sum-exp [N] over the whole vocabulary; `partial` is that over this rank's part of it."""
    if model_parallel_rank_and_size()[1] == 1:
        return partial
    # log sum over ranks of exp(partial), one number per token and rank.
    return _gather(partial[:, None]).logsumexp(-1)


def vocabulary_log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-probabilities [N, rows] of this rank's tokens, normalized over the whole vocabulary; logits [N, rows]."""
    if model_parallel_rank_and_size()[1] == 1:
        return logits.log_softmax(-1, dtype=dtype)
    # log p(v) = logit(v) - LSE over the parts of all ranks.
    logits = logits.to(dtype)
    return logits - log_sum_exp_over_ranks(logits.logsumexp(-1))[:, None]
