"""Tensor parallelism for targets, around transformers' own modules.

Each rank holds the heads, MLP columns and vocabulary rows that `target_split` assigned to it, in modules of that size.
Partial sums are all-reduced after the embedding, each attention and each MLP. The target is frozen, so these sums need
no backward. `share_target` sets the group of the ranks. In training each of them holds the whole draft; in decoding the
draft is split as well. Without a group every function here returns its input.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.errors import UserError
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.target_split import cut_weights, has_parts, rank_config, rank_folder, vocabulary_rows

CHECKSUM_MODULUS = 2**31 - 1
_group: dist.ProcessGroup | None = None
"""The ranks that share a target; None if this process has the whole target."""


def share_target(group: dist.ProcessGroup | None) -> None:
    """Let the ranks of `group` share a target. None ends this."""
    global _group
    _group = group


def model_parallel_rank_and_size() -> tuple[int, int]:
    """This process's (rank, world size) among the ranks that share a target; (0, 1) if it has the whole target."""
    return (0, 1) if _group is None else (dist.get_rank(_group), dist.get_world_size(_group))


class _Gathered(torch.autograd.Function):
    """The parts [..., n] of all ranks, concatenated along the last dimension: [..., world * n].

    The backward pass returns to each rank the gradient of its own part.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        rank, world = model_parallel_rank_and_size()
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(world)]
        dist.all_gather(parts, part, _group)
        ctx.rank, ctx.width = rank, part.shape[-1]
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
        return upstream.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous()


class PretrainedModelParallelPreSplitMixin:
    """Loads a target from `path`, or with tensor parallelism this rank's part from `path/mp_{rank}-of-{world}/`.

    A target that is not split is cut while it is read.
    """

    @staticmethod
    def shard_path(path: str | Path) -> str:
        """The folder (or hub id) this rank loads: `path` itself when tensor parallelism is off or it is not split."""
        rank, world = model_parallel_rank_and_size()
        return str(Path(path) / rank_folder(rank, world)) if world > 1 and has_parts(path, world) else str(path)


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
        return sum_over_ranks(embeddings.masked_fill(elsewhere[..., None], 0))


class VocabularyHead(nn.Module):
    """The lm_head of a split vocabulary of `size` tokens: row i of `weight` [rows, hidden] scores token `first` + i.

    A call returns the logits of the whole vocabulary. The training losses use `weight` directly and never need them.
    """

    def __init__(self, weight: nn.Parameter, first: int, size: int) -> None:
        super().__init__()
        self.weight, self.first, self.size = weight, first, size

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., size]"""
        return self.gathered(F.linear(hidden, self.weight))

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits of all ranks [..., size], bitwise the same on each, from those of this rank's rows [..., rows]."""
        most = len(vocabulary_rows(self.size, 0, model_parallel_rank_and_size()[1]))
        padded = F.pad(logits, (0, most - len(self.weight)))  # only the last rank has fewer
        return _Gathered.apply(padded)[..., : self.size].contiguous()


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
        _sum_outputs(layer.self_attn.o_proj, layer.mlp.down_proj)


def split_draft(model: Any) -> None:
    """Replace the draft of a pair whose target is shared by this rank's part of it: its heads and its MLP columns."""
    rank, world = model_parallel_rank_and_size()
    whole = model.draft_model
    if not isinstance(whole, GlideDecoderLayer):
        raise UserError(f"tp_size: must be 1 with a draft of the architecture {whole.options.architecture}")
    config = rank_config(model.config, rank, world)
    config.vocab_size = model.config.vocab_size
    width = whole.options.mlp_size
    with torch.device("meta"):
        part = type(whole)(config, replace(whole.options, mlp_size=width and width // world))
    weights = {name: weight.detach() for name, weight in whole.named_parameters()}
    part.load_state_dict(cut_weights(weights, rank, world), assign=True)
    part.set_vocabulary(whole.vocabulary)
    part.requires_grad_(False)
    mlp: Any = part.mlp
    _sum_outputs(part.self_attn.o_proj, mlp.down_proj, *(cross.o_proj for cross in part.cross_attentions))
    model.draft_model = part


def _sum_outputs(*row_parallel: nn.Module) -> None:
    """Let the outputs of these modules be summed over the ranks."""
    for module in row_parallel:
        module.register_forward_hook(sum_output)


def sum_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A forward hook that sums a module's output over the ranks."""
    return sum_over_ranks(output)


def gather_heads(heads: Tensor) -> Tensor:
    """The KV heads of all ranks [B, K, T, D] from those of this rank [B, K / world, T, D]."""
    if model_parallel_rank_and_size()[1] == 1:
        return heads
    # Heads become the last dimension, along which parts are concatenated: [B, T, K · D].
    whole = _Gathered.apply(heads.transpose(1, 2).flatten(2))
    return whole.unflatten(2, (-1, heads.shape[-1])).transpose(1, 2)


def sum_over_ranks(partial: Tensor) -> Tensor:
    """`partial` summed over the ranks that share a target, in place; bitwise the same on each."""
    if model_parallel_rank_and_size()[1] > 1:
        dist.all_reduce(partial, group=_group)
    return partial


def max_over_ranks(values: Tensor) -> Tensor:
    """The elementwise maximum of `values` over the ranks that share a target, in place."""
    if model_parallel_rank_and_size()[1] > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, _group)
    return values


def least_over_ranks(number: int, device: torch.device) -> int:
    """The smallest `number` of the ranks that share a target. The host waits for `device`."""
    if model_parallel_rank_and_size()[1] == 1:
        return number
    return -int(max_over_ranks(torch.tensor(-number, device=device)))


def ranks_differ(values: Tensor) -> Tensor:
    """Whether the ranks that share a target hold different `values`, an integer tensor: bool [], the same on all.
    Compares a weighted sum of the values. One all-reduce, which a CUDA graph can capture."""
    flat = values.flatten().long()
    weights = (torch.arange(len(flat), device=flat.device) * 48271 + 11) ** 2 % CHECKSUM_MODULUS
    checksum = ((flat + 1) * weights).sum() % CHECKSUM_MODULUS
    highest, lowest = max_over_ranks(torch.stack([checksum, -checksum]))
    return highest != -lowest


def log_sum_exp_over_ranks(partial: Tensor) -> Tensor:
    """The log-sum-exp [N] over the whole vocabulary; `partial` is that over this rank's part of it."""
    if model_parallel_rank_and_size()[1] == 1:
        return partial
    # log sum over ranks of exp(partial), one number per token and rank.
    return _Gathered.apply(partial[:, None]).logsumexp(-1)
