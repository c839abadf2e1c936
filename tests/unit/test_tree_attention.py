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


def check(case: tuple[Tensor, ...], device: str, with_tree: bool = True, tolerance: float | None = None) -> Tensor:
    q, k, v, lengths, mask, outs, lses = (x.to(device) for x in case)
    parts = PrefixParts(outs, lses, BLOCK, overlap=False)
    inputs = (q, k, v, lengths, mask if with_tree else None, 0.2, parts)
    got = prefix_and_tree_attention(*inputs)
    assert got.dtype == q.dtype and got.transpose(1, 2).is_contiguous()
    tolerance = tolerance or TOLERANCE[q.dtype]
    torch.testing.assert_close(
        got, attention_reference.prefix_and_tree_attention(*inputs), atol=tolerance, rtol=tolerance
    )
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[0, 48], [0]])
def test_queries_without_keys_get_zero_and_blocks_without_keys_change_nothing(lengths: list[int], device: str) -> None:
    """The running maximum starts at -inf, and its update must not compute -inf - -inf. The one part is empty."""
    case = make_case(lengths, 1, 1, 100, 64, 1, torch.float32)
    case[4][0] = torch.arange(100) >= 64
    case[4][0, 5] = False
    case[4][1:] = False
    got = check(case, device)
    assert got[0, :, 5].eq(0).all() and got[1:].eq(0).all() and got.isfinite().all()
    assert check(case, device, with_tree=False).eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_with_near_and_distant_lses_are_merged(offset: float, dtype: torch.dtype, device: str) -> None:
    """They neither overflow nor vanish. Parts in either dtype accumulate in fp32; empty ones hold NaN."""
    for lengths, kv_heads, nodes, parts in (([20], 1, 9, 3), ([95, 3], 2, 5, 5)):
        *case, outs, lses = make_case(lengths, kv_heads, 2, nodes, 80, parts, dtype)
        tolerance = 1e-3 if dtype == torch.float32 and offset else None  # an LSE of 1000 has an ulp of 6e-5
        assert check((*case, outs.to(dtype), lses + offset), device, tolerance=tolerance).isfinite().all()


def test_tensors_that_the_kernel_would_misread_are_refused() -> None:
    q, k, v, lengths, mask, outs, lses = make_case([30], 2, 2, 4, 64, 1, torch.float32)
    rest = (lengths, mask, 0.1, PrefixParts(outs, lses, BLOCK, overlap=False))
    with pytest.raises(ValueError, match="contiguous"):
        prefix_and_tree_attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, *rest)
    with pytest.raises(ValueError, match="dtypes"):
        prefix_and_tree_attention(q, k.half(), v.half(), *rest)
    with pytest.raises(ValueError, match="shapes"):
        prefix_and_tree_attention(q[:, :3], k, v, *rest)
