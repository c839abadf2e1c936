"""Parts of a prefix that attention to a tree merges, in Triton's interpreter and on the GPU.

`test_attention` compares prefix and tree with dense attention.
"""

import pytest
import torch
from kernel_devices import DEVICES, TOLERANCE
from torch import Tensor

pytest.importorskip("triton")

import attention_reference

from longspec.kernels.shared.attention import PrefixParts
from longspec.kernels.triton.tree_attention import prefix_and_tree_attention

BLOCK = 48


def make_case(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, parts: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k, v, lengths, mask, outputs and LSEs of the parts.

    All strides differ. Slots that the kernel must not read hold NaN, and so does every third part, which is empty.
    """
    generator = torch.Generator().manual_seed(nodes + head_dim)
    batch, slots = len(lengths), max(lengths) + nodes + 7
    q = torch.randn(batch, nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    k = torch.full((batch, kv_heads, slots, head_dim), torch.nan)
    v = torch.full((slots, batch, kv_heads, head_dim + 3), torch.nan).permute(1, 2, 0, 3)[..., :head_dim]
    for row, length in enumerate(lengths):
        used = slice(length // BLOCK * BLOCK, length + nodes)
        for x in (k, v):
            x[row, :, used] = torch.randn(kv_heads, used.stop - used.start, head_dim, generator=generator)
    mask = torch.ones(batch, nodes + 9, nodes + 70, dtype=torch.bool)[:, :nodes, :nodes]
    mask &= torch.rand(batch, nodes, nodes, generator=generator) < 0.6
    outs = torch.randn(parts, batch, nodes, kv_heads * group, head_dim, generator=generator).transpose(2, 3)
    lses = 2 + torch.randn(parts, batch, kv_heads * group, nodes, generator=generator)
    outs[::3], lses[::3] = torch.nan, -torch.inf
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor(lengths), mask, outs, lses


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "nodes", "parts"), [([0, 48], 1, 100, 1), ([20], 1, 9, 3), ([95, 3], 2, 5, 5)]
)
def test_parts_are_merged(
    lengths: list[int], kv_heads: int, nodes: int, parts: int, dtype: torch.dtype, device: str
) -> None:
    """Empty parts, whose outputs are NaN, change nothing; a query that sees no key gets 0."""
    *case, mask, outs, lses = (x.to(device) for x in make_case(lengths, kv_heads, 2, nodes, 80, parts, dtype))
    mask[0, 2] = False
    inputs = (*case, mask, 0.2, PrefixParts(outs.to(dtype), lses, BLOCK, overlap=False))
    got, expected = prefix_and_tree_attention(*inputs), attention_reference.prefix_and_tree_attention(*inputs)
    assert got.dtype == dtype and got.transpose(1, 2).is_contiguous() and got.isfinite().all()
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert lengths[0] or got[0, :, 2].eq(0).all()
