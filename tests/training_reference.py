"""Plain torch references of training's attention, and of the FlashAttention calls that it consists of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attention_reference import attention_with_lse
from torch import Tensor

from longspec.kernels.training import torch_flash
from longspec.kernels.training.segments import BLOCK, Segments


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Dense attention [N, H, D] of flattened tokens; q [N, H, D]; k, v [M, K, D]; mask bool [N, M]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention_with_lse(q, k, v, mask[None], scale)[0][0].transpose(0, 1)


def causal_mask(segments: Segments, window: int | None = None) -> Tensor:
    """bool [N, N]: query i sees key j of its segment if i - window <= j <= i - lag, in offsets."""
    offsets, number = _offsets(segments)
    lag = torch.tensor(segments.lags, device=segments.device)[number][:, None]
    distance = offsets[:, None] - offsets[None]
    # Both conditions: the same segment, and far enough back.
    visible = (number[:, None] == number[None]) & (distance >= lag)
    return visible if window is None else visible & (distance <= window)


def block_mask(segments: Segments) -> Tensor:
    """bool [N, N]: query i sees key j of its segment if j // BLOCK < i // BLOCK, in offsets."""
    offsets, number = _offsets(segments)
    earlier = offsets[None] // BLOCK < offsets[:, None] // BLOCK
    return (number[:, None] == number[None]) & earlier


def steps_mask(segments: Segments, steps: int, window: int) -> Tensor:
    """bool [N, steps · N]: the keys of each step that the queries of the last step of training-time test see."""
    offsets, number = _offsets(segments)
    distance = offsets[:, None] - offsets[None]
    same, back = number[:, None] == number[None], steps - 1
    first = (distance >= back) & (distance <= window) & (offsets[None] > 0)
    if not back:
        first |= (distance == 0) & (offsets[None] == 0)  # the first token sees itself
    later = [distance == back - step for step in range(1, steps)]
    return torch.cat([same & seen for seen in (first, *later)], 1)


def _offsets(segments: Segments) -> tuple[Tensor, Tensor]:
    """Offset of each token in its segment and the number of its segment, both LongTensor [N]."""
    lengths = torch.tensor(segments.lengths)
    offsets = torch.cat([torch.arange(length) for length in segments.lengths])
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    return offsets.to(segments.device), number.to(segments.device)


def _visible(query_bounds: list[int], key_bounds: list[int], reach: int) -> Tensor:
    """FlashAttention's causal mask, bool [N, keys], which aligns the ends of the queries and keys of each segment."""
    mask = torch.zeros(query_bounds[-1], key_bounds[-1], dtype=torch.bool)
    for number in range(len(query_bounds) - 1):
        (q0, q1), (k0, k1) = query_bounds[number : number + 2], key_bounds[number : number + 2]
        last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        keys = torch.arange(k1 - k0)[None]
        mask[q0:q1, k0:k1] = (keys <= last) & ((keys >= last - reach) if reach >= 0 else True)
    return mask


def _scores(q: Tensor, k: Tensor, segments: Segments, scale: float, reach: int = -1) -> Tensor:
    """Scores [H, N, keys], -inf where a key is invisible."""
    queries, keys, longest, most_keys = torch_flash._sizes(segments)
    assert queries.dtype == keys.dtype == torch.int32
    assert longest == queries.diff().max() and most_keys == keys.diff().max()
    mask = _visible(queries.tolist(), keys.tolist(), reach)
    scores = torch.einsum("nhd,khd->hnk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return scores.masked_fill(~mask, -torch.inf)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, ...]:
    """`torch_flash.flash_forward`."""
    scores = _scores(q, k, *call)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # the kernel's LSE of a query without keys
    values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hnk,khd->nhd", (scores - lse[..., None]).exp(), values), lse, torch.empty(0), torch.empty(0)


def flash_backward(
    upstream: Tensor, saved: tuple[Tensor, ...], segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, ...]:
    """`torch_flash.flash_backward` by FlashAttention's published formulas, from the `out` and `lse` that are passed."""
    q, k, v, out, lse, *state = saved
    assert lse.is_contiguous() and len(state) == 2
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = (_scores(q, k, segments, scale, reach) - lse[..., None]).exp()
    dscores = torch.einsum("nhd,khd->hnk", upstream, values) - (upstream * out).sum(-1).T[..., None]
    dscores = weights * dscores * scale
    dq = torch.einsum("hnk,khd->nhd", dscores, keys)
    dk, dv = torch.einsum("hnk,nhd->khd", dscores, q), torch.einsum("hnk,nhd->khd", weights, upstream)
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def plain_loss(
    loss: str, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Reference of `DraftLoss`: the sum over tokens, from all logits. The hidden state at i predicts label i + 1.
    target_hidden: None for the loss `ce`."""
    logits, targets = head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
    ce = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    if target_hidden is None:
        return ce
    scored = targets != -100
    logits, teacher = logits[scored], head(target_hidden[:, :-1]).flatten(0, 1)[scored]
    kl = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)
    accepted = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    return {"ce": ce, "distill": kl, "mixed": (ce + kl) / 2, "acceptance": -accepted.log().sum()}[loss]
