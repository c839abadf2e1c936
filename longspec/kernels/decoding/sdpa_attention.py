"""Decoding attention on torch's scaled_dot_product_attention, for any device and dtype."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from longspec.kernels.decoding.attention_interface import Attend
from longspec.kernels.decoding.attention_reference import ring_visible

FOLD_LIMIT = 32
"""Largest number of queries for which the query heads of a group become rows of their KV head. For few queries this is
faster on the CPU."""


class SdpaAttention:
    """Decoding attention on torch; reads `lengths` on the host."""

    name = "sdpa"
    capturable = False

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            def at_length(length: int, q: Tensor, k: Tensor, v: Tensor, tree_mask: Tensor) -> Tensor:
                # All of the prefix is visible, then the nodes under the mask.
                visible = F.pad(tree_mask, (length, 0), value=True)
                return masked_sdpa(q, k, v, visible, scale)

            return _by_length(at_length, lengths, q.shape[2], q, k, v, tree_mask)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        def at_length(length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if length == 0:
                return torch.zeros_like(q)
            return _sdpa(q, k, v, None, scale)

        return _by_length(at_length, lengths, 0, q, k, v)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        # Rows need no grouping by length here: all W + M slots are finite.
        window = k.shape[2] - tree_mask.shape[2]
        ring = ring_visible(lengths, level, window, q.shape[2])
        return masked_sdpa(q, k, v, torch.cat([ring, tree_mask], 2), scale)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return masked_sdpa(q, k, v, mask, scale)

    def chunk(self, rows: Tensor, ends: Tensor) -> Attend | None:
        return None

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_prefill(q, k, v, scale)


def causal_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`DecodingAttention.prefill` on torch. On CUDA its fused kernels run, which need no [N, S] mask."""
    nodes, slots = q.shape[2], k.shape[2]
    if not q.is_cuda and nodes < slots:
        visible = torch.ones(nodes, slots, dtype=torch.bool).tril(slots - nodes)
        return _sdpa(q, k, v, visible.expand(len(q), -1, -1), scale)

    # The only fused kernel that takes fp32 does not take grouped heads.
    if q.is_cuda and q.dtype == torch.float32:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    bias = causal_lower_right(nodes, slots)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention to all S slots, which must be finite, where mask, bool [B, N, S], is True. Differentiable."""
    sees_any = mask.any(-1, keepdim=True)
    # A softmax over no key is NaN, and so is its gradient. Such a query attends to all keys and its output is zeroed.
    out = _sdpa(q, k, v, mask | ~sees_any, scale)
    return out.masked_fill(~sees_any[:, None], 0.0)


def _by_length(
    attend: Callable[..., Tensor], lengths: Tensor, nodes: int, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> Tensor:
    """Call attend(length, q, k, v, *others) for the sequences of each length together.

    k and v are cut after the first length + `nodes` slots, so that no later one is read.
    """
    counts = lengths.tolist()
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


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's attention with grouped heads; mask is bool [B, N, S] with a visible key in each row, or None for all."""
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    if mask is not None and nodes > FOLD_LIMIT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=True)

    # [B, H, N, D] -> [B, K, H / K · N, D]: the group becomes part of the query dimension.
    group = heads // kv_heads
    rows = q.reshape(batch, kv_heads, group * nodes, head_dim)
    row_mask = None if mask is None else mask.repeat(1, group, 1)[:, None]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=row_mask, scale=scale).reshape(q.shape)
