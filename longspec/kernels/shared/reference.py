"""Plain torch references of the kernels in this folder, with their signatures, and of attention itself.

No tricks: each function is its formula in fp32 or wider. Query head h reads KV head h // (H // K). LSE is the natural
logarithm. A query that sees no key gets output 0 and LSE -inf. Shape letters are those of CONTRIBUTING.md; E is the
hidden size, I the intermediate size of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.shared.watch import Watch

if TYPE_CHECKING:
    from longspec.kernels.shared.logit_statistics import LogitStatistics


class HeadNorms(NamedTuple):
    """RMSNorm of each head of queries and keys, before the rotary embedding: weights [D] and eps."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


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


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys, (output [..., D], LSE [...]), from its states over P parts of the keys.

    o = sum_p exp(lse_p - lse) * o_p with lse = log sum_p exp(lse_p). outs [P, ..., D]; lses [P, ...], -inf for an empty
    part, whose output may hold anything.
    """
    lse = lses.logsumexp(0)
    weights = lses.softmax(0).masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    # 0 * NaN is NaN, so the outputs of empty parts are cleared.
    return (weights * outs.masked_fill(weights == 0.0, 0.0)).sum(0), lse


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    """Reference of `elementwise.rms_norm`."""
    if parts is not None:
        x.copy_(x.float() + parts.sum(0))
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    # transformers rounds before it multiplies by the weight.
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Reference of `elementwise.gather_rows`."""
    return table[index]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Reference of `elementwise.swiglu`."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    rope: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Reference of `elementwise.rotate_and_store`."""
    kv_heads, head_dim = keys.shape[1], keys.shape[-1]
    q_width = qkv.shape[-1] - 2 * kv_heads * head_dim
    q, k, v = qkv.split([q_width, kv_heads * head_dim, kv_heads * head_dim], -1)
    if norms is not None:
        q = rms_norm(q.unflatten(-1, (-1, head_dim)), norms.q_weight, norms.eps).flatten(2)
        k = rms_norm(k.unflatten(-1, (-1, head_dim)), norms.k_weight, norms.eps).flatten(2)
    rotated = rotate_queries(k, positions, rope, head_dim)
    stored = v.unflatten(-1, (kv_heads, head_dim)).transpose(1, 2)
    for b, token in (slots >= 0).nonzero().tolist():
        row, slot = b if rows is None else rows[b], slots[b, token]
        keys[row, :, slot] = rotated[b, :, token]
        values[row, :, slot] = stored[b, :, token]
    return rotate_queries(q, positions, rope, head_dim)


def rotate_queries(q: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor], head_dim: int) -> Tensor:
    """Reference of `elementwise.rotate_queries`."""
    heads = q.unflatten(-1, (q.shape[-1] // head_dim, head_dim))
    cos, sin = (table[positions.long()].float()[:, :, None] for table in rope)
    low, high = heads.float().chunk(2, -1)
    rotated = heads.float() * cos + torch.cat([-high, low], -1) * sin
    return rotated.to(q.dtype).transpose(1, 2)


def over_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits [B, ..., V] in fp32 or wider, divided by temperature, fp64 [B]; None is 1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature is None else wide / temperature.to(wide.dtype).view(-1, *[1] * (logits.dim() - 1))


def logit_statistics(logits: Tensor, temperature: Tensor | None, noise: Tensor | None = None) -> LogitStatistics:
    """Reference of `logit_statistics.logit_statistics`."""
    from longspec.kernels.shared.logit_statistics import CHUNK, SUB, LogitStatistics

    rows = over_temperature(logits, temperature).reshape(-1, logits.shape[-1])
    keys = rows if noise is None else rows - noise.reshape(rows.shape).float().log()
    sub_chunks = F.pad(keys, (0, -rows.shape[1] % SUB), value=-torch.inf).unflatten(1, (-1, SUB))
    chunks = F.pad(rows, (0, -rows.shape[1] % CHUNK), value=-torch.inf).unflatten(1, (-1, CHUNK))
    maxima = chunks.amax(-1)
    finite = maxima.masked_fill(maxima == -torch.inf, 0.0)
    sums = (chunks - finite[..., None]).exp().sum(-1)
    return LogitStatistics(sub_chunks.amax(-1), maxima, sums)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Reference of `logit_statistics.log_sum_exp`; also takes fp64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def softmax(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
    """Reference of `logit_statistics.softmax`; also takes fp64."""
    probabilities = over_temperature(logits, temperature).softmax(-1)
    if watch is not None:
        watch.record(probabilities[..., 0].isnan())  # a row that defines no distribution is NaN throughout
    return probabilities
