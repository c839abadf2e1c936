"""FlashAttention-2 as torch builds it, over packed segments and with gradients.

`scaled_dot_product_attention` passes neither segments nor windows. Shape letters are those of CONTRIBUTING.md; N counts
flattened tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspec.kernels.training.segments import Segments


def visible(k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """The keys and values that some query sees. With a lag, the last ones of each segment are dropped, so that the ends
    of queries and keys align."""
    rows = segments.keys.rows
    return (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))


class TorchFlash(torch.autograd.Function):
    """`flash_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int) -> Tensor:
        out, lse, *state = flash_forward(q, k, v, segments, scale, reach)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.call = segments, scale, reach
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *flash_backward(upstream, ctx.saved_tensors, *ctx.call), None, None, None


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention to the visible keys k, v.

    reach: how many keys before its newest visible one a query sees; -1 for all. Returns the output [N, H, D], the
    natural-log LSE, fp32 [H, N], +inf for a query that sees no key, and two tensors for `flash_backward`.
    """
    dropout, causal, return_debug_mask = 0.0, True, False
    inputs = (q, k, v, *_sizes(segments), dropout, causal, return_debug_mask)
    return torch.ops.aten._flash_attention_forward(*inputs, **_options(scale, reach))[:4]


def flash_backward(
    upstream: Tensor, saved: Sequence[Tensor], segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where the weight of a key is exp(score - lse) and `out` is the output of all keys.

    saved: q, k, v, out, lse and the two tensors from `flash_forward`.
    """
    dropout, causal = 0.0, True
    inputs = (upstream.contiguous(), *saved[:5], *_sizes(segments), dropout, causal, *saved[5:])
    return torch.ops.aten._flash_attention_backward(*inputs, **_options(scale, reach))


def _sizes(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_bounds, segments.keys.bounds, segments.longest, segments.keys.longest


def _options(scale: float, reach: int) -> dict[str, Any]:
    left, right = (None, None) if reach < 0 else (reach, 0)
    return {"scale": scale, "window_size_left": left, "window_size_right": right}
