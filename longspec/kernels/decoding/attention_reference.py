"""Plain torch references of the Triton kernels: same signatures but for how to launch, no tricks.

Shape letters: B batch, N nodes (queries), M keys, Hq query heads, Hkv KV heads, D head_dim, S cache slots, P partials.
Everywhere in this package: query head h reads KV head h // (Hq // Hkv), LSE is natural-log, a row that sees no key
gives output 0 and LSE -inf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longspec.kernels.decoding.attention_tiles import PrefixParts, Tiles


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention and its log-sum-exp, computed in fp32 (fp64 when q is fp64).

    q [B, Hq, N, D]; k, v [B, Hkv, M, D]; mask bool [B, N, M], True = visible, or None = everything is.
    Returns o [B, Hq, N, D] in q's dtype and lse [B, Hq, N] in fp32 (fp64 when q is fp64).
    """
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, nodes, head_dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    grouped = q.to(compute_dtype).view(batch, kv_heads, heads // kv_heads, nodes, head_dim)
    scores = torch.einsum("bhgnd,bhmd->bhgnm", grouped, k.to(compute_dtype)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1) if keys else scores.new_full(scores.shape[:-1], -torch.inf)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    out = torch.einsum("bhgnm,bhmd->bhgnd", weights, v.to(compute_dtype))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, heads, nodes)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, num_splits: int, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Reference of `longspec.kernels.decoding.prefix_attention.prefix_attention`."""
    out = q.new_zeros((num_splits, *q.shape), dtype=torch.float32)
    lse = out.new_full(out.shape[:-1], -torch.inf)
    for row, length in enumerate(lengths.tolist()):
        blocks = length // tiles.block_n
        for split in range(num_splits):
            first, last = (blocks * edge // num_splits * tiles.block_n for edge in (split, split + 1))
            q_row, k_row, v_row = q[row, None], k[row, None, :, first:last], v[row, None, :, first:last]
            part = attention_with_lse(q_row.float(), k_row.float(), v_row.float(), None, scale)
            out[split, row], lse[split, row] = part[0][0], part[1][0]
    return out, lse


def prefix_and_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    parts: PrefixParts,
) -> Tensor:
    """Reference of `longspec.kernels.decoding.tree_attention.prefix_and_tree_attention`."""
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        first = length // parts.block * parts.block
        mask = torch.ones(1, q.shape[2], length - first, dtype=torch.bool, device=q.device)
        if tree_mask is not None:
            mask = torch.cat([mask, tree_mask[row, None]], 2)
        slots = slice(first, first + mask.shape[2])
        q_row, k_row, v_row = q[row, None], k[row, None, :, slots], v[row, None, :, slots]
        rest = attention_with_lse(q_row.float(), k_row.float(), v_row.float(), mask, scale)
        outs = torch.cat([parts.outs[:, row].float(), rest[0]])
        out[row] = merge_states(outs, torch.cat([parts.lses[:, row], rest[1]]))[0]
    return out


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    level: int,
    tree_mask: Tensor,
    scale: float,
) -> Tensor:
    """Reference of `longspec.kernels.decoding.tree_attention.window_attention`; every slot must hold finite values."""
    mask = torch.cat([ring_visible(lengths, level, k.shape[2] - tree_mask.shape[2], q.shape[2]), tree_mask], 2)
    return attention_with_lse(q, k, v, mask, scale)[0]


def ring_visible(lengths: Tensor, level: int, window: int, nodes: int) -> Tensor:
    """bool [B, nodes, window]: the ring slots that the queries at positions lengths[b] + level see.

    Slot s of the ring holds the newest position p < lengths[b] with p % window == s.
    """
    newest = lengths[:, None].long() - 1
    held = newest - (newest - torch.arange(window, device=lengths.device)) % window
    visible = (held >= 0) & (held >= lengths[:, None] + level - window)
    return visible[:, None].expand(-1, nodes, -1)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys, o [..., D] and lse [...], from states over parts of them.

    outs [P, ..., D]; lses [P, ...], natural log, -inf for a part that saw no key, whose output may hold anything.
    """
    lse = lses.logsumexp(0)
    weights = lses.softmax(0).masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    return (weights * outs.masked_fill(weights == 0.0, 0.0)).sum(0), lse


def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """Reference of `longspec.kernels.decoding.compaction.compact`."""
    rows = torch.arange(len(lengths), device=keys.device)[:, None]
    step = torch.arange(path.shape[1], device=keys.device)
    source = lengths[:, None] + torch.where(step < counts[:, None], path, step)
    target = lengths[:, None] + step
    for store in (keys, values):
        store[:, rows, :, target] = store[:, rows, :, source]
