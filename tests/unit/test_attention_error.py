"""The error of every backend's verification attention relative to fp64."""

from collections.abc import Callable

import pytest
import torch
from test_attention import attend, with_backends  # noqa: F401
from torch import Tensor

from longspec.kernels.torch.attention import DecodingAttention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HUGE = 1e4
LOGITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "plain": lambda prefix, tree: None,
    "equal": lambda prefix, tree: None,
    "huge of either sign": lambda prefix, tree: (prefix[::3].fill_(HUGE), prefix[1::3].fill_(-HUGE), tree.fill_(HUGE)),
    "dominant first slot": lambda prefix, tree: prefix[:1].fill_(HUGE),
    "dominant last slot": lambda prefix, tree: prefix[-1:].fill_(HUGE),
    "dominant root": lambda prefix, tree: tree[0].fill_(HUGE),
    "prefix far below tree": lambda prefix, tree: prefix.fill_(-HUGE),
    "tree far below prefix": lambda prefix, tree: tree.fill_(-HUGE),
}
"""Changes of the offsets, 0 elsewhere, that are added to the scores of the slots of prefix and tree."""
U32 = 2.0**-24
"""Unit roundoff of fp32, in which all backends accumulate."""

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]


def make_case(
    logits: str, lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, device: str
) -> Case:
    """q, k, v, lengths, tree_mask, scale. Slots past lengths[b] + nodes are NaN. Dimension 0 produces the offsets."""
    generator = torch.Generator().manual_seed(nodes)
    on_device = torch.Generator(device).manual_seed(nodes)
    scale, batch = head_dim**-0.5, len(lengths)
    q = torch.randn(batch, kv_heads * group, nodes, head_dim, generator=on_device, device=device)
    k, v = torch.randn(2, batch, kv_heads, max(lengths) + nodes + 11, head_dim, generator=on_device, device=device)
    q[..., 0] = (HUGE / scale) ** 0.5
    if logits == "equal":
        q.zero_()
    for row, length in enumerate(lengths):
        used = length + nodes
        offsets = torch.zeros(used)
        LOGITS[logits](*offsets.split([length, nodes]))
        k[row, :, :used, 0] = offsets.to(device) / (HUGE * scale) ** 0.5
        k[row, :, used:] = v[row, :, used:] = torch.nan
    tree_mask = torch.rand(batch, nodes, nodes, generator=generator) < 0.3
    tree_mask = tree_mask.tril() | torch.eye(nodes, dtype=torch.bool)
    tree_mask[:, :, 0] = True
    return q, k, v, torch.tensor(lengths, device=device), tree_mask.to(device), scale


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output in fp64 and the score magnitude sum_j p_j (1 - p_j) |s_j| of each query, one KV head at a time."""
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(batch, kv_heads, heads // kv_heads, nodes, head_dim, dtype=torch.float64, device=q.device)
    magnitude = out.new_empty(out.shape[:-1])
    for row, length in enumerate(lengths.tolist()):
        visible = torch.nn.functional.pad(tree_mask[row], (length, 0), value=True)
        for head in range(kv_heads):
            keys, values = (x[row, head, : length + nodes].double() for x in (k, v))
            scores = q[row].unflatten(0, (kv_heads, -1))[head].double() @ keys.T * scale
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[row, head] = weights @ values
            magnitude[row, head] = (weights * (1 - weights) * scores.abs()).sum(-1)
    return out.view(q.shape), magnitude.view(q.shape[:-1])


def check(backend: DecodingAttention, case: Case, dtype: torch.dtype) -> None:
    """The error of each query, relative to the norm of its exact output, is within the bound.

    The softmax weights and the output are rounded to the dtype once each, 2 u = eps with its unit roundoff u. The rest
    is fp32 with roundings of random sign. A score s is the sum of head_dim products: its error ds is about
    sqrt(head_dim / 3) U32 |s|; three times that is allowed. It moves the output by sum_j p_j ds_j (v_j - out), where
    |v_j - out| <= (1 - p_j) 2 max|v|. The sum over the keys adds sqrt(keys) U32, and exp2 of the hardware two ulp, 4
    U32.
    """
    q, k, v, lengths, tree_mask, scale = case
    q, k, v = (x.to(dtype) for x in (q, k, v))
    expected, magnitude = exact(q, k, v, lengths, tree_mask, scale)
    got = backend.hybrid(lengths, tree_mask)(q, k, v, scale)
    assert got.dtype == dtype and got.isfinite().all()
    keys = (lengths + q.shape[2]).view(-1, 1, 1)
    bound = torch.finfo(dtype).eps + U32 * (6 * (q.shape[3] / 3) ** 0.5 * magnitude + keys**0.5 + 4)
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    worst = (error / bound).max().item()
    assert worst <= 1, f"{worst:.2f} times the bound; errors per row {error.amax((1, 2)).tolist()}"


Sizes = tuple[list[int], int, int, int, int]
"""Lengths, KV heads, query heads per KV head, nodes and head_dim."""
ON_CPU: list[Sizes] = [([0, 1, 64, 500], 1, 4, 69, 64), ([2048], 1, 4, 69, 64), ([0, 1, 65], 1, 4, 1, 128)]
INTERPRETED: list[Sizes] = [([0, 130], 1, 1, 33, 64), ([0, 1, 65], 1, 4, 1, 128)]
ON_GPU: list[Sizes] = [([n], 8, 4, nodes, 128) for n in (0, 1, 4096, 32768, 131072) for nodes in (1, 69)]


@pytest.mark.parametrize(("attend", "dtype"), with_backends(*((dtype,) for dtype in DTYPES)), indirect=["attend"])
@pytest.mark.parametrize("logits", LOGITS)
def test_attention_is_as_exact_as_its_dtype(
    logits: str,
    dtype: torch.dtype,
    attend: tuple[DecodingAttention, str],  # noqa: F811
) -> None:
    backend, device = attend
    for sizes in ON_GPU if device == "cuda" else INTERPRETED if backend.name == "triton" else ON_CPU:
        check(backend, make_case(logits, *sizes, device), dtype)
