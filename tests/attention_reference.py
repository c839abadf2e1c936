"""Attention in plain torch, and references of the attention kernels that `DecodingAttention` does not have.

Arithmetic is in fp32 or wider. Query head h reads KV head h // (H // K). LSE is the natural logarithm. A query that
sees no key gets output 0 and LSE -inf.
"""

import torch
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix, PagedTree, PrefixParts
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.torch.layers import ResidualStream


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention and its log-sum-exp, computed in fp32 (in fp64 if q is fp64).

    q [B, H, N, D]; k, v [B, K, S, D]; mask bool [B, N, S], True where a key is visible, or None for all.
    Returns the output [B, H, N, D] in q's dtype and the LSE [B, H, N] in fp32 or fp64.
    """
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, nodes, head_dim = q.shape
    kv_heads, slots = k.shape[1], k.shape[2]
    grouped = q.to(compute_dtype).view(batch, kv_heads, heads // kv_heads, nodes, head_dim)
    scores = torch.einsum("bkgnd,bksd->bkgns", grouped, k.to(compute_dtype)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)

    lse = scores.logsumexp(-1) if slots else scores.new_full(scores.shape[:-1], -torch.inf)
    # Where no key is visible, -inf - -inf would be NaN; with an LSE of 0 every weight is 0.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    out = torch.einsum("bkgns,bksd->bkgnd", weights, v.to(compute_dtype))
    return out.reshape(q.shape).to(q.dtype), lse.reshape(batch, heads, nodes)


def prefix_and_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor | None, scale: float, parts: PrefixParts
) -> Tensor:
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
        # o = sum_p exp(lse_p - lse) * o_p with lse = log sum_p exp(lse_p); the output of an empty part may be NaN.
        weights = torch.cat([parts.lses[:, row], rest_lse]).softmax(0).nan_to_num(0.0)[..., None]
        outs = torch.cat([parts.outs[:, row].float(), rest_out])
        out[row] = (weights * outs.masked_fill(weights == 0.0, 0.0)).sum(0)
    return out


def token_attention(qkv: Tensor, slots: TokenSlots, lengths: Tensor, scale: float, norms: HeadNorms | None) -> Tensor:
    kv_heads, head_dim = slots.keys.shape[1], slots.keys.shape[3]
    q = ResidualStream(qkv, 0.0).rotate_and_store(qkv, slots, norms)
    own = torch.empty(2, len(qkv), kv_heads, 1, head_dim, dtype=qkv.dtype, device=qkv.device)
    first = slots._replace(keys=own[0], values=own[1], slots=torch.zeros_like(slots.slots))
    ResidualStream(qkv, 0.0).rotate_and_store(qkv, first, norms)
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        k_row, v_row = (torch.cat([x[row, :, :length], y[row]], 1) for x, y in zip(slots[2:4], own, strict=True))
        out[row] = attention_with_lse(q[row, None], k_row[None], v_row[None], None, scale)[0][0]
    return out.transpose(1, 2).flatten(2)


def path_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, paths: Tensor | None, scale: float) -> Tensor:
    out = torch.empty_like(q)
    for row, length in enumerate(lengths.tolist()):
        for node in range(q.shape[2]):
            path = [0] if paths is None else paths[row, node, 1 : 2 + int(paths[row, node, 0])].tolist()
            slots = [*range(length), *(length + number for number in path)]
            one = q[row, None, :, node, None], k[row, None][:, :, slots], v[row, None][:, :, slots]
            out[row, :, node] = attention_with_lse(*one, None, scale)[0][0, :, 0]
    return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    nodes, slots = q.shape[2], k.shape[2]
    visible = torch.ones(len(q), nodes, slots, dtype=torch.bool, device=q.device).tril(slots - nodes)
    return attention_with_lse(q, k, v, visible, scale)[0]


def paged_attention(q: Tensor, prefix: PagedPrefix, out: Tensor, scale: float, tree: PagedTree | None = None) -> None:
    nodes = q.shape[2]
    for row, (begin, end) in enumerate(zip(prefix.begins.tolist(), prefix.ends.tolist(), strict=True)):
        own, length = prefix.slots[begin:end].long(), end - begin
        keys, values, mask = prefix.keys[own], prefix.values[own], None
        if tree is not None:
            in_tree = slice(row * nodes, (row + 1) * nodes)
            keys, values = torch.cat([keys, tree.keys[in_tree]]), torch.cat([values, tree.values[in_tree]])
            start = int(tree.mask_starts[row])
            mask = tree.mask[start : start + nodes * (length + nodes)].view(1, nodes, -1).bool().clone()
            mask[..., :length] = True
        rows = q[row, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        out[row] = attention_with_lse(*rows, mask, scale)[0][0].transpose(0, 1)
