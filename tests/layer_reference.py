"""Plain torch references of the layers' kernels and of the statistics of logits, with their signatures.

Each function is its formula in fp32 or wider. Shape letters are those of CONTRIBUTING.md; E is the hidden size, I the
intermediate size of the MLP.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.shared.residual import HeadNorms
from longspec.kernels.torch.vocabulary import over_temperature
from longspec.kernels.triton.logit_statistics import CHUNK, SUB, LogitStatistics


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    if parts is not None:
        x.copy_(x.float() + parts.sum(0))
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    # transformers rounds before it multiplies by the weight.
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
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
    heads = q.unflatten(-1, (q.shape[-1] // head_dim, head_dim))
    cos, sin = (table[positions.long()].float()[:, :, None] for table in rope)
    low, high = heads.float().chunk(2, -1)
    rotated = heads.float() * cos + torch.cat([-high, low], -1) * sin
    return rotated.to(q.dtype).transpose(1, 2)


def logit_statistics(logits: Tensor, temperature: Tensor | None, noise: Tensor | None = None) -> LogitStatistics:
    rows = over_temperature(logits, temperature).reshape(-1, logits.shape[-1])
    keys = rows if noise is None else rows - noise.reshape(rows.shape).float().log()
    sub_chunks = F.pad(keys, (0, -rows.shape[1] % SUB), value=-torch.inf).unflatten(1, (-1, SUB))
    chunks = F.pad(rows, (0, -rows.shape[1] % CHUNK), value=-torch.inf).unflatten(1, (-1, CHUNK))
    maxima = chunks.amax(-1)
    finite = maxima.masked_fill(maxima == -torch.inf, 0.0)
    sums = (chunks - finite[..., None]).exp().sum(-1)
    return LogitStatistics(sub_chunks.amax(-1), maxima, sums)
