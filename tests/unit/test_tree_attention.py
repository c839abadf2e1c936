"""The tree-attention kernel against its torch reference, in Triton's interpreter and on the GPU."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspec.kernels import reference
from longspec.kernels.tree_attention import tree_attention

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_case(
    batch: int, kv_heads: int, group: int, nodes: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, starts, mask; K and V differ in strides, every slot outside the tree is NaN, the mask's rows are cut
    out of a wider all-True one."""
    generator = torch.Generator().manual_seed(nodes + head_dim)
    slots = 2 * nodes + 7
    q = torch.randn(batch, nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    k = torch.full((batch, kv_heads, slots, head_dim), torch.nan)
    v = torch.full((slots, batch, kv_heads, head_dim + 3), torch.nan).permute(1, 2, 0, 3)[..., :head_dim]
    starts = torch.randint(0, slots - nodes + 1, (batch,), generator=generator)
    starts[0] = 0
    for row, start in enumerate(starts.tolist()):
        tree = slice(start, start + nodes)
        k[row, :, tree] = torch.randn(kv_heads, nodes, head_dim, generator=generator)
        v[row, :, tree] = torch.randn(kv_heads, nodes, head_dim, generator=generator)
    mask = torch.ones(batch, nodes + 9, nodes + 70, dtype=torch.bool)[:, :nodes, :nodes]
    mask &= torch.rand(batch, nodes, nodes, generator=generator) < 0.6
    return q.to(dtype), k.to(dtype), v.to(dtype), starts, mask


def check(case: tuple[Tensor, ...], device: str, scale: float = 0.2) -> tuple[Tensor, Tensor]:
    q, k, v, starts, mask = (x.to(device) for x in case)
    out, lse = tree_attention(q, k, v, starts, mask, scale)
    expected_out, expected_lse = reference.tree_attention(q, k, v, starts, mask, scale)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out, expected_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)
    return out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "nodes", "head_dim"),
    [
        (2, 2, 1, 1, 64),
        (1, 1, 8, 1, 128),
        (2, 1, 4, 69, 64),
        (1, 1, 5, 69, 128),
        (1, 2, 8, 5, 80),
        (2, 2, 1, 70, 128),
        (1, 1, 1, 150, 16),
    ],
)
def test_equals_the_reference_over_odd_shapes(
    batch: int, kv_heads: int, group: int, nodes: int, head_dim: int, device: str
) -> None:
    """Strides of K and V, the mask's bounds and slots outside the tree (NaN) all matter to this comparison."""
    check(make_case(batch, kv_heads, group, nodes, head_dim), device)


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_accumulates_in_fp32(device: str) -> None:
    check(make_case(1, 1, 4, 69, 64, torch.float16), device)


@pytest.mark.parametrize("device", DEVICES)
def test_fully_masked_rows_give_zero_and_minus_infinity(device: str) -> None:
    case = make_case(2, 1, 4, 37, 64)
    case[4][0, 5] = False
    case[4][1] = False
    out, lse = check(case, device)
    assert out[0, :, 5].eq(0).all() and lse[0, :, 5].eq(-torch.inf).all()
    assert out[1].eq(0).all() and lse[1].eq(-torch.inf).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_first_block_without_visible_keys_does_not_poison_the_rest(device: str) -> None:
    """Online softmax starts at -inf; its update must not form -inf - -inf."""
    case = make_case(1, 1, 1, 100, 64)
    case[4][:, :, :64] = False
    case[4][:, :, 64:] = True
    out, _ = check(case, device)
    assert out.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_scale_is_the_callers(device: str) -> None:
    check(make_case(1, 1, 1, 9, 128), device, scale=1.7)


def test_tensors_the_kernel_would_misread_are_refused() -> None:
    q, k, v, starts, mask = make_case(1, 2, 2, 4, 64)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, starts, mask, 0.1)
    with pytest.raises(ValueError, match="dtypes"):
        tree_attention(q, k.half(), v.half(), starts, mask, 0.1)
    with pytest.raises(ValueError, match="shapes"):
        tree_attention(q[:, :3], k, v, starts, mask, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 5, 8])
def test_every_dtype_and_group_on_the_gpu(group: int, head_dim: int, dtype: torch.dtype) -> None:
    for nodes in (1, 69, 300):
        check(make_case(3, 2, group, nodes, head_dim, dtype), "cuda")
