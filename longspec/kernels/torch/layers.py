"""The layers in plain torch: few calls between two products."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.shared.residual import HeadNorms, TokenSlots


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """The rows [B, N, hidden] of a contiguous table [V, hidden] for tokens [B, N]."""
    return F.embedding(tokens, table)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, x contiguous [B, N, in]: [B, N, out]."""
    return F.linear(x, weight, bias)


class ResidualStream:
    """Hidden states [B, N, hidden] that the layers of a pass add to; `hidden` is changed in place.

    A stream serves one pass, so positions and slots are the same in all layers. This one runs on torch's operations.
    """

    linear = staticmethod(linear)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        """eps: the epsilon of every RMSNorm in the pass."""
        self.hidden, self.eps = hidden, eps
        self.rotation: tuple[Tensor, Tensor] | None = None
        """cos [B, N, 1, D] at the tokens' positions, and sin with its first half negated."""
        self.stored: tuple[Tensor, Tensor, Tensor | None] | None = None
        """LongTensors [T]: row of the cache and slot of each token that has a slot, and its number below B · N; None
        if all have slots."""

    def current(self) -> Tensor:
        """A copy of the hidden states with all that was added so far."""
        return self.hidden.clone()

    def normed(self, norm: Tensor) -> Tensor:
        """RMSNorm of the stream with weight `norm`: [B, N, hidden]."""
        return _rms_norm(self.hidden, norm, self.eps)

    def project(self, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(RMSNorm(stream)): [B, N, out]."""
        return self.linear(self.normed(norm), weight, bias)

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) · up of RMSNorm(stream); weight [2·I, hidden], gates first: [B, N, I]."""
        gate, up = self.linear(self.normed(norm), weight).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def add(self, x: Tensor) -> None:
        """stream += x, [B, N, hidden] or, the same for all tokens of a row, [B, 1, hidden]."""
        self.hidden.add_(x)

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        """stream += x @ weight.T, x [B, N, in]. last: no norm follows."""
        self.add(self.linear(x, weight))

    def rotate_and_store(self, qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None = None) -> Tensor:
        """Write the keys and values of a merged projection [B, N, (H + 2K)·D] to the cache.

        Returns the rotated queries [B, H, N, D].
        """
        kv_heads, head_dim = slots.keys.shape[1], slots.keys.shape[3]
        heads = qkv.unflatten(-1, (-1, head_dim))
        q_heads = heads.shape[2] - 2 * kv_heads
        q_and_k, v = heads.split([q_heads + kv_heads, kv_heads], 2)
        if norms is not None:
            parts = zip(q_and_k.split([q_heads, kv_heads], 2), norms[:2], strict=True)
            q_and_k = torch.cat([_rms_norm(x, weight, norms.eps) for x, weight in parts], 2)
        q, k = self._rotated(q_and_k, slots).split([q_heads, kv_heads], 2)

        if self.stored is None:
            sequence, number = (slots.slots >= 0).nonzero(as_tuple=True)
            row = sequence if slots.rows is None else slots.rows[sequence].long()
            nodes = slots.slots.shape[1]
            kept = None if len(row) == slots.slots.numel() else sequence * nodes + number
            self.stored = row, slots.slots[sequence, number].long(), kept
        row, slot, kept = self.stored
        for store, new in ((slots.keys, k.flatten(0, 1)), (slots.values, v.flatten(0, 1))):
            store[row, :, slot] = new if kept is None else new[kept]
        return q.transpose(1, 2)

    def rotate(self, q: Tensor, slots: TokenSlots) -> Tensor:
        """Rotary embedding of q, contiguous [B, N, H·D]: [B, H, N, D]."""
        return self._rotated(q.unflatten(-1, (-1, slots.keys.shape[3])), slots).transpose(1, 2)

    def _rotated(self, heads: Tensor, slots: TokenSlots) -> Tensor:
        """Rotary embedding of heads [B, N, H, D] with halves (low, high).

        low · cos - high · sin, high · cos + low · sin
        """
        half = heads.shape[-1] // 2
        if self.rotation is None:
            cos, sin = (table[slots.positions][:, :, None] for table in slots.rope)
            self.rotation = cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)
        cos, sin = self.rotation
        return torch.addcmul(heads * cos, heads.roll(half, -1), sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `torch.nn.functional.rms_norm`, which takes twice as many operations."""
    if x.dtype in (torch.float16, torch.bfloat16):  # it computes in float32, where squares do not overflow
        return F.rms_norm(x, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = torch.addcmul(torch.full_like(norm, eps), norm, norm, value=1 / x.shape[-1])
    return (x * mean_square.rsqrt_()).mul_(weight)
