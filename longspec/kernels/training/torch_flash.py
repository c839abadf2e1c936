"""FlashAttention-2 as torch builds it, over packed segments and with gradients, and its merge with a few near keys.

`scaled_dot_product_attention` passes neither segments nor windows. Shape letters are those of CONTRIBUTING.md; N counts
flattened tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspec.kernels.training.segments import Segments


def visible(k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """The keys and values that some query sees. With a lag, the last ones of each segment are dropped, so that the ends
    of queries and keys align."""
    rows = segments.keys.rows
    return (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))


class TorchFlash(torch.autograd.Function):
    """`_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int) -> Tensor:
        out, lse, *state = _forward(q, k, v, segments, scale, reach)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.call = segments, scale, reach
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward(upstream, ctx.saved_tensors, *ctx.call), None, None, None


class Near(NamedTuple):
    """Keys and values [N, K, D] of which each query sees at most one: that of the row `distance` before its own."""

    k: Tensor
    v: Tensor
    distance: int
    seen: Tensor
    """Whether each query sees its key, bool [N]; not so for the first `distance` queries of a segment."""


def merged(
    q: Tensor, k: Tensor, v: Tensor, near: Sequence[Near], segments: Segments, scale: float, reach: int = -1
) -> Tensor:
    """Attention over the keys k, v that a FlashAttention call shows and those of `near`. reach: as in `_forward`."""
    tensors = chain.from_iterable((one.k, one.v, one.seen) for one in near)
    distances = [one.distance for one in near]
    return _MergedFlash.apply(q, *visible(k, v, segments), (segments, scale, reach), distances, *tensors)


class _MergedFlash(torch.autograd.Function):
    """A FlashAttention call over far keys, and near keys by plain torch operations, merged by their log-sum-exp.

    In backward the weight of a key is exp(score - lse) with the LSE of the whole, so each part computes its gradient
    from the `out` and `lse` of the whole, as the parts of ring attention do (arXiv 2310.01889):
        ds_ij = w_ij * (do_i . v_j - do_i . o_i) * scale,  dq_i = sum_j ds_ij * k_j
        dk_j = sum_i ds_ij * q_i,                          dv_j = sum_i w_ij * do_i
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: tuple, distances: list[int], *near: Tensor) -> Tensor:
        """k, v: the visible far keys. call: segments, scale and reach of `_forward`. near: the three tensors of each
        `Near`."""
        far, far_lse, *state = _forward(q, k, v, *call)
        far_lse = far_lse.T
        # A query that sees no key at all has the LSE +inf, so that all its weights are 0.
        scores = [_near_scores(q, key, distance, seen, call[1]) for key, _, distance, seen in _each(near, distances)]
        parts = torch.stack([far_lse.masked_fill(far_lse == torch.inf, -torch.inf), *scores])
        lse = parts.logsumexp(0)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)

        weights = (parts - lse).exp()[..., None]
        out = weights[0] * far
        for weight, (_, value, distance, _) in zip(weights[1:], _each(near, distances), strict=True):
            out += _per_query_head(value.roll(distance, 0), q) * weight
        out = out.to(q.dtype)

        ctx.save_for_backward(q, k, v, out, lse.T.contiguous(), *state, *near)
        ctx.call, ctx.distances = call, distances
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # read once: under gradient checkpointing a second read fails
        saved, near = tensors[:7], tensors[7:]
        q, _, _, out, lse, *_ = saved
        dq, dk, dv = _backward(upstream, saved, *ctx.call)
        wide_q, wide, dq = q.to(lse.dtype), upstream.to(lse.dtype), dq.to(lse.dtype)
        mean = (wide * out).sum(-1)  # do . o
        gradients: list[Tensor | None] = []
        for key, value, distance, seen in _each(near, ctx.distances):
            weight = (_near_scores(q, key, distance, seen, ctx.call[1]) - lse.T).exp()
            k, v = (_per_query_head(x.roll(distance, 0), q) for x in (key, value))
            ds = (weight * ((wide * v).sum(-1) - mean) * ctx.call[1])[..., None]
            dq += ds * k
            if any(ctx.needs_input_grad[1:]):
                own = (ds * wide_q, weight[..., None] * wide)
                gradients += [_per_key_head(x, key).roll(-distance, 0) for x in own]
            else:
                gradients += [None, None]
            gradients.append(None)
        return dq.to(q.dtype), dk, dv, None, None, *gradients


def _each(near: Sequence[Tensor], distances: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, int, Tensor]]:
    """k, v, distance and seen of each `Near`, from their tensors in one row."""
    return zip(near[::3], near[1::3], distances, near[2::3], strict=True)


def _near_scores(q: Tensor, k: Tensor, distance: int, seen: Tensor, scale: float) -> Tensor:
    """The scores [N, H] of the keys at a distance, in fp32 or wider; -inf for those that are not seen."""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    scores = (wide * _per_query_head(k.roll(distance, 0), q)).sum(-1) * scale
    return scores.masked_fill(~seen[:, None], -torch.inf)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[N, K, D] -> [N, H, D]: the KV head of each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_key_head(x: Tensor, k: Tensor) -> Tensor:
    """[N, H, D] -> [N, K, D]: the sum over the query heads of each KV head, in the dtype of k [N, K, D]."""
    return x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention to the visible keys k, v.

    reach: how many keys before its newest visible one a query sees; -1 for all. Returns the output [N, H, D], the
    natural-log LSE, fp32 [H, N], +inf for a query that sees no key, and two tensors for `_backward`.
    """
    dropout, causal, return_debug_mask = 0.0, True, False
    inputs = (q, k, v, *_sizes(segments), dropout, causal, return_debug_mask)
    return torch.ops.aten._flash_attention_forward(*inputs, **_options(scale, reach))[:4]


def _backward(
    upstream: Tensor, saved: Sequence[Tensor], segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where the weight of a key is exp(score - lse) and `out` is the output of all keys.

    saved: q, k, v, out, lse and the two tensors from `_forward`.
    """
    dropout, causal = 0.0, True
    inputs = (upstream.contiguous(), *saved[:5], *_sizes(segments), dropout, causal, *saved[5:])
    return torch.ops.aten._flash_attention_backward(*inputs, **_options(scale, reach))


def _sizes(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_bounds, segments.keys.bounds, segments.longest, segments.keys.longest


def _options(scale: float, reach: int) -> dict[str, Any]:
    left, right = (None, None) if reach < 0 else (reach, 0)
    return {"scale": scale, "window_size_left": left, "window_size_right": right}
