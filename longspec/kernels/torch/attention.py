"""The interface of decoding attention, implemented with torch's scaled_dot_product_attention for any device and dtype.

Shape letters are those of CONTRIBUTING.md; W is the window of the draft, M the number of nodes of its tree so far.
q is [B, H, N, D]; k and v are [B, K, S, D] with a contiguous last dimension; outputs are [B, H, N, D] in q's dtype.
`lengths` is int [B]: the prefix of sequence b is in slots 0 … lengths[b] - 1. A query that sees no key gets 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from longspec.kernels.shared.attention import Attend

FOLD_LIMIT = 32
"""Largest number of queries for which the query heads of a group become rows of their KV head. For few queries this is
faster on the CPU."""


class DecodingAttention:
    """The attention of a backend. Slots after the used ones may hold anything, NaN included, without effect on a
    result. This one runs on torch and reads `lengths` on the host."""

    name = "sdpa"
    """Kernels that read the prefix: "flash", "triton", "native", "sdpa" or "deterministic"."""
    capturable = False
    """Whether a CUDA graph may capture the calls, because no value of `lengths` is read on the host."""

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        """Attention of a verification pass, to be called once per layer: each query sees the whole prefix of its
        sequence and, under `tree_mask`, nodes of the tree.

        The keys of the M nodes are already in slots lengths[b] … lengths[b] + M - 1. tree_mask is bool [B, N, M], True
        where query i sees key node j; the queries of a verification pass are the M nodes. (LongSpec, arXiv 2502.17421:
        hybrid tree attention.)
        """
        counts = lengths.tolist()
        nodes = tree_mask.shape[2]
        masks: dict[int, _Mask | None] = {}
        """Those of the sequences of each length, which are the same in all layers."""

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            def at_length(length: int, q: Tensor, k: Tensor, v: Tensor, tree_mask: Tensor) -> Tensor:
                if length not in masks:
                    # All of the prefix is visible, then the nodes under the mask.
                    visible = F.pad(tree_mask, (length, 0), value=True)
                    masks[length] = None if nodes == 1 and visible.all() else _new_mask(visible, q, k)
                return _sdpa(q, k, v, masks[length], scale)

            return _by_length(at_length, counts, nodes, q, k, v, tree_mask)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """The draft's cross-attention: each query sees the whole prefix of its sequence, which may be empty."""

        def at_length(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if length == 0:
                return torch.zeros_like(q)
            return _sdpa(q, k, v, None, scale)

        return _by_length(at_length, lengths.tolist(), 0, q, k, v)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        """The draft's self-attention: N nodes of one level see a ring buffer of accepted tokens and nodes of the tree.

        k and v [B, K, W + M, D] are finite. Slot s < W holds the newest position p < lengths[b] with p % W == s, and
        slot W + j holds node j. The queries are at position lengths[b] + level. They see position p if p >= 0 and
        p >= lengths[b] + level - W, and node j where tree_mask, bool [B, N, M], is True.
        """
        # Rows need no grouping by length here: all W + M slots are finite.
        window = k.shape[2] - tree_mask.shape[2]
        lengths = lengths[:, None]
        age = (lengths - 1 - torch.arange(window, device=lengths.device)) % window  # 0 for the newest position
        visible = age < lengths.clamp(max=window - level)
        visible = visible[:, None].expand(-1, q.shape[2], -1)
        return self.masked(q, k, v, torch.cat([visible, tree_mask], 2), scale)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention to all S slots, which are finite, where mask, bool [B, N, S], is True. Differentiable on torch."""
        return _sdpa(q, k, v, _new_mask(mask, q, k), scale)

    def chunk(self, rows: Tensor, ends: Tensor) -> Attend | None:
        """Causal attention of a captured pass over N more tokens of n sequences, to be called once per layer. None if
        the backend has no kernel for it.

        rows, ends: int32 [n]. Sequence b is in row rows[b] of the cache k, v [B, K, S, D], which is finite. The keys of
        its N tokens are already in slots ends[b] - N … ends[b] - 1; slots beyond S must not be needed.
        """
        return None

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of a chunk of the prompt: the N queries belong to the last N of the S slots. On CUDA torch's
        fused kernels run, which need no [N, S] mask."""
        nodes, slots = q.shape[2], k.shape[2]
        if not q.is_cuda and nodes < slots:
            bias = q.new_full((1, nodes, slots), -torch.inf).triu_(slots - nodes + 1)
            return _sdpa(q, k, v, _Mask(_folded(bias, q, k)), scale)

        # The only fused kernel that takes fp32 does not take grouped heads.
        if q.is_cuda and q.dtype == torch.float32:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

        bias = causal_lower_right(nodes, slots)
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)


def _by_length(
    attend: Callable[..., Tensor], counts: list[int], nodes: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> Tensor:
    """Call attend(length, q, k, v, *others) for the sequences of each length together. k and v are cut after the first
    length + `nodes` slots, so that no later one is read."""
    if len(set(counts)) == 1:
        used = counts[0] + nodes
        return attend(counts[0], q, k[:, :, :used], v[:, :, :used], *others)

    out = torch.empty_like(q)
    for count in set(counts):
        rows = [row for row, length in enumerate(counts) if length == count]
        # A slice is a view; a list of rows copies the used slots of these sequences.
        index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        stores = k[:, :, : count + nodes], v[:, :, : count + nodes]
        selected = [x[index] for x in (q, *stores, *others)]
        out[index] = attend(count, *selected)
    return out


class _Mask(NamedTuple):
    """A mask for `_sdpa`."""

    bias: Tensor
    """[B, 1, rows, S] in the queries' dtype: 0 where a key is visible, else -inf; 0 throughout for a query that sees no
    key, because a softmax over no key is NaN, and so is its gradient."""
    sees_any: Tensor | None = None
    """bool [B, 1, N, 1]: whether a query sees a key; None if all do."""


def _new_mask(visible: Tensor, q: Tensor, k: Tensor) -> _Mask:
    """The mask of queries that see keys where `visible`, bool [B, N, S], is True."""
    sees_any = visible.any(-1, keepdim=True)
    # On CUDA the host would wait for the answer.
    all_see = not q.is_cuda and bool(sees_any.all())
    if not all_see:
        visible = visible | ~sees_any
    bias = q.new_zeros(()).where(visible, -torch.inf)
    return _Mask(_folded(bias, q, k), None if all_see else sees_any[:, None])


def _folded(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A bias [B, N, S] as `_sdpa` takes it: [B, 1, rows, S]."""
    group = q.shape[1] // k.shape[1] if q.shape[2] <= FOLD_LIMIT else 1
    return (bias.repeat(1, group, 1) if group > 1 else bias)[:, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: _Mask | None, scale: float) -> Tensor:
    """torch's attention with grouped heads; a mask of None makes all keys visible."""
    bias = None if mask is None else mask.bias
    if q.shape[2] <= FOLD_LIMIT:
        # [B, H, N, D] -> [B, K, H / K · N, D]: the group becomes part of the query dimension.
        rows = q.reshape(len(q), k.shape[1], -1, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=bias, scale=scale).reshape(q.shape)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    return out if mask is None or mask.sees_any is None else out.masked_fill(~mask.sees_any, 0.0)
