"""Plain torch references of the attention kernels, with their signatures; parameters of the launch have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspec.kernels.decoding.attention_interface import PrefixParts
from longspec.kernels.shared.reference import attention_with_lse, merge_states

if TYPE_CHECKING:
    from longspec.kernels.decoding.attention_tiles import Tiles


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, num_splits: int, tiles: Tiles, overlap: bool
) -> PrefixParts:
    """Reference of `prefix_attention.prefix_attention`."""
    shares = split_blocks(lengths, num_splits, tiles.block_n)
    return flash_prefix(q.float(), k.float(), v.float(), scale, shares, tiles.block_n)._replace(overlap=overlap)


def flash_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float, shares: Tensor, block: int) -> PrefixParts:
    """Reference of `flash_attention.flash_prefix`."""
    splits = shares.shape[1] // len(q)
    outs = q.new_zeros(splits, *q.shape)
    lses = outs.new_full(outs.shape[:-1], -torch.inf, dtype=torch.float32)
    for part, (row, begin, end) in enumerate(shares.T.tolist()):
        split = part // len(q)
        out, lse = attention_with_lse(q[row, None], k[row, None, :, begin:end], v[row, None, :, begin:end], None, scale)
        outs[split, row] = out[0]
        lses[split, row] = lse[0]
    return PrefixParts(outs, lses, block, overlap=False)


def split_blocks(lengths: Tensor, splits: int, block: int) -> Tensor:
    """Reference of `flash_attention.split_blocks`."""
    blocks = lengths.long() // block
    rows = torch.arange(len(lengths), device=lengths.device)
    columns = []
    for part in range(splits):
        begin = blocks * part // splits * block
        end = blocks * (part + 1) // splits * block
        columns.append(torch.stack([rows, begin, end]))
    return torch.cat(columns, 1).int()


def prefix_and_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    parts: PrefixParts,
    shared_memory: int,
) -> Tensor:
    """Reference of `tree_attention.prefix_and_tree_attention`."""
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        first = length // parts.block * parts.block
        mask = torch.ones(1, q.shape[2], length - first, dtype=torch.bool, device=q.device)
        if tree_mask is not None:
            mask = torch.cat([mask, tree_mask[row, None]], 2)
        slots = slice(first, first + mask.shape[2])
        q_row = q[row, None].float()
        k_row = k[row, None, :, slots].float()
        v_row = v[row, None, :, slots].float()
        rest_out, rest_lse = attention_with_lse(q_row, k_row, v_row, mask, scale)
        outs = torch.cat([parts.outs[:, row].float(), rest_out])
        lses = torch.cat([parts.lses[:, row], rest_lse])
        out[row] = merge_states(outs, lses)[0]
    return out


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float, shared_memory: int
) -> Tensor:
    """Reference of `window_attention.window_attention`."""
    window = k.shape[2] - tree_mask.shape[2]
    ring_mask = ring_visible(lengths, level, window, q.shape[2])
    return attention_with_lse(q, k, v, torch.cat([ring_mask, tree_mask], 2), scale)[0]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, shared_memory: int) -> Tensor:
    """Reference of `tree_attention.masked_attention`."""
    return attention_with_lse(q, k, v, mask, scale)[0]


def ring_visible(lengths: Tensor, level: int, window: int, nodes: int) -> Tensor:
    """bool [B, nodes, window]: the slots of the ring that queries at position lengths[b] + level see.

    Slot s of the ring holds the newest position p < lengths[b] with p % window == s. It is visible if p >= 0 and
    p >= lengths[b] + level - window.
    """
    lengths = lengths[:, None]
    age = (lengths - 1 - torch.arange(window, device=lengths.device)) % window  # 0 for the newest position
    visible = age < lengths.clamp(max=window - level)
    return visible[:, None].expand(-1, nodes, -1)
