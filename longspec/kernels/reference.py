"""Plain torch references of the Triton kernels: same signatures, no tricks. Tests compare the two.

Shape letters: B batch, N nodes (queries), M keys, Hq query heads, Hkv KV heads, D head_dim, S cache slots, P partials.
Everywhere in this package: query head h reads KV head h // (Hq // Hkv), LSE is natural-log, a row that sees no key
gives output 0 and LSE -inf.
"""

import torch
from torch import Tensor

SPLIT_ALIGNMENT = 64


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


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Reference of `longspec.kernels.tree_attention.tree_attention`."""
    nodes = q.shape[2]
    rows = [slice(start, start + nodes) for start in starts.tolist()]
    tree_k = torch.stack([k[row, :, slots] for row, slots in enumerate(rows)])
    tree_v = torch.stack([v[row, :, slots] for row, slots in enumerate(rows)])
    return attention_with_lse(q.float(), tree_k.float(), tree_v.float(), mask, scale)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, num_splits: int
) -> tuple[Tensor, Tensor]:
    """Reference of `longspec.kernels.prefix_attention.prefix_attention`."""
    out = q.new_zeros((num_splits, *q.shape), dtype=torch.float32)
    lse = out.new_full(out.shape[:-1], -torch.inf)
    for row, length in enumerate(lengths.tolist()):
        chunk = split_length(length, num_splits)
        for split in range(num_splits):
            slots = slice(split * chunk, min(length, (split + 1) * chunk))
            if slots.start < slots.stop:
                q_row, k_row, v_row = q[row, None], k[row, None, :, slots], v[row, None, :, slots]
                part = attention_with_lse(q_row.float(), k_row.float(), v_row.float(), None, scale)
                out[split, row], lse[split, row] = part[0][0], part[1][0]
    return out, lse


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of `longspec.kernels.merge.merge_states`."""
    lse = lses.logsumexp(0)
    weights = lses.softmax(0).masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    return (weights * outs.masked_fill(weights == 0.0, 0.0)).sum(0), lse


def split_length(length: int, num_splits: int) -> int:
    """Slots of one split of a prefix: an equal share, rounded up to a multiple of SPLIT_ALIGNMENT."""
    share = -(-length // num_splits)
    return -(-share // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT


def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """Reference of `longspec.kernels.compaction.compact`."""
    rows = torch.arange(len(lengths), device=keys.device)[:, None]
    step = torch.arange(path.shape[1], device=keys.device)
    source = lengths[:, None] + torch.where(step < counts[:, None], path, step)
    target = lengths[:, None] + step
    for store in (keys, values):
        store[:, rows, :, target] = store[:, rows, :, source]
