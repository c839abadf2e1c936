"""Plain torch references of the layers' kernels and of the statistics of logits.

Each function is its formula in fp32 or wider. Shape letters are those of CONTRIBUTING.md; E is the hidden size, I the
intermediate size of the MLP.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from kernel_devices import random
from torch import Tensor

from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.torch.layers import ResidualStream
from longspec.kernels.torch.vocabulary import over_temperature
from longspec.kernels.triton.logit_statistics import CHUNK, SUB, LogitStatistics
from longspec.models.draft_layer import rotate


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    if parts is not None:
        x.copy_(x.float() + parts.sum(0))
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    # transformers rounds before it multiplies by the weight.
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def check_rotation(
    stream: Callable[[Tensor, float], ResidualStream],
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: str,
    norms: HeadNorms | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """`rotate_and_store` and `rotate` of a backend's stream equal the formula; returns the queries [B, H, N, D].

    A negative slot stores nothing, and no other slot of the cache, which has more rows than the batch, changes.
    """
    qkv = random(2, 3, (heads + 2 * kv_heads) * head_dim).to(device)
    positions = torch.tensor([[0, 4, 4], [8, 9, 2]], device=device)
    numbers = torch.tensor([[0, 10, -1], [3, 1, 2]], device=device)
    rope = random(10, head_dim, seed=1).to(device), random(10, head_dim, seed=2).to(device)
    keys, values = random(2, 4, kv_heads, 11, head_dim, seed=3).to(device)
    expected_keys, expected_values = keys.clone(), values.clone()
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 2)
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    table = rope[0][positions], rope[1][positions]
    expected, rotated = (rotate(x.transpose(1, 2), table) for x in (q, k))
    for sequence, token in (numbers >= 0).nonzero().tolist():
        row, slot = sequence if rows is None else rows[sequence], numbers[sequence, token]
        expected_keys[row, :, slot] = rotated[sequence, :, token]
        expected_values[row, :, slot] = v[sequence, token]

    slots, close = TokenSlots(positions, rope, keys, values, numbers, rows), {"rtol": 1e-5, "atol": 2e-6}
    got = stream(qkv, 0.0).rotate_and_store(qkv.clone(), slots, norms)
    torch.testing.assert_close((got, keys, values), (expected, expected_keys, expected_values), **close)
    alone = stream(qkv, 0.0).rotate(q.flatten(2).contiguous(), slots)
    torch.testing.assert_close(alone, expected, **close)
    return got


def logit_statistics(logits: Tensor, temperature: Tensor | None, noise: Tensor | None = None) -> LogitStatistics:
    rows = over_temperature(logits, temperature).reshape(-1, logits.shape[-1])
    keys = rows if noise is None else rows - noise.reshape(rows.shape).float().log()
    sub_chunks = F.pad(keys, (0, -rows.shape[1] % SUB), value=-torch.inf).unflatten(1, (-1, SUB))
    chunks = F.pad(rows, (0, -rows.shape[1] % CHUNK), value=-torch.inf).unflatten(1, (-1, CHUNK))
    maxima = chunks.amax(-1)
    finite = maxima.masked_fill(maxima == -torch.inf, 0.0)
    sums = (chunks - finite[..., None]).exp().sum(-1)
    return LogitStatistics(sub_chunks.amax(-1), maxima, sums)
