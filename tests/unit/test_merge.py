"""Merging partial attentions by LSE: the kernel against its reference, and the algebra against dense attention."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspec.kernels import reference
from longspec.kernels.merge import merge_states
from longspec.kernels.prefix_attention import prefix_attention
from longspec.kernels.tree_attention import tree_attention

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def make_parts(parts: int, shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(parts)
    outs = torch.randn(parts, *shape, generator=generator)
    lses = 20 * torch.randn(parts, *shape[:-1], generator=generator)
    return outs.to(device), lses.to(device)


def check(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    merged = merge_states(outs, lses)
    torch.testing.assert_close(merged, reference.merge_states(outs, lses), atol=1e-5, rtol=1e-5)
    return merged


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("parts", "shape"), [(1, (2, 3, 1, 64)), (2, (1, 4, 69, 128)), (5, (1, 5, 7, 80)), (9, (33, 16))]
)
def test_equals_the_reference(parts: int, shape: tuple[int, ...], device: str) -> None:
    check(*make_parts(parts, shape, device))


@pytest.mark.parametrize("device", DEVICES)
def test_two_parts_weigh_by_the_sigmoid_of_their_lse_difference(device: str) -> None:
    outs, lses = make_parts(2, (4, 6, 64), device)
    sigma = torch.sigmoid(lses[0] - lses[1]).unsqueeze(-1)
    torch.testing.assert_close(merge_states(outs, lses)[0], sigma * outs[0] + (1 - sigma) * outs[1])


@pytest.mark.parametrize("device", DEVICES)
def test_parts_that_saw_nothing_do_not_count(device: str) -> None:
    """First, middle and last part empty, whatever their output holds; a row with no part at all gives 0 and -inf."""
    outs, lses = make_parts(4, (5, 64), device)
    for part, row in [(0, 0), (2, 1), (3, 2), (0, 3), (1, 3), (2, 3), (3, 3)]:
        lses[part, row] = -torch.inf
        outs[part, row] = torch.nan
    out, lse = check(outs, lses)
    assert out.isfinite().all()
    assert out[3].eq(0).all() and lse[3] == -torch.inf


@pytest.mark.parametrize("device", DEVICES)
def test_large_lse_does_not_overflow(device: str) -> None:
    outs, lses = make_parts(3, (5, 64), device)
    out, lse = check(outs, lses + 1000)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_output_dtype_is_the_one_asked_for(device: str) -> None:
    outs, lses = make_parts(2, (5, 64), device)
    out, lse = merge_states(outs, lses, torch.float16)
    assert out.dtype == torch.float16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), reference.merge_states(outs, lses)[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [0, 100])
def test_prefix_and_tree_kernels_merge_to_dense_attention(length: int, device: str) -> None:
    """The decomposition that verification rests on, against one dense fp64 attention."""
    generator = torch.Generator().manual_seed(3)
    nodes, kv_heads, group, head_dim = 21, 2, 4, 64
    q = torch.randn(1, kv_heads * group, nodes, head_dim, generator=generator)
    k, v = torch.randn(2, 1, kv_heads, length + nodes, head_dim, generator=generator)
    mask = (torch.rand(1, nodes, nodes, generator=generator) < 0.3) | torch.eye(nodes, dtype=torch.bool)
    visible = torch.cat([torch.ones(1, nodes, length, dtype=torch.bool), mask], 2)
    expected = reference.attention_with_lse(q.double(), k.double(), v.double(), visible, 0.125)

    q, k, v, mask, lengths = (x.to(device) for x in (q, k, v, mask, torch.tensor([length])))
    prefix = prefix_attention(q, k, v, lengths, 0.125, 2)
    tree = tree_attention(q, k, v, lengths, mask, 0.125)
    merged = merge_states(*(torch.cat([many, one[None]]) for many, one in zip(prefix, tree, strict=True)))
    for got, want in zip(merged, expected, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, atol=1e-5, rtol=1e-5)
