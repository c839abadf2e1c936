"""Training attention: values and gradients against the reference, dense attention under a mask, in fp64."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
import training_reference as reference
from torch import Tensor

from longspec.kernels.training import varlen_flash
from longspec.kernels.training.segments import Segments
from longspec.kernels.training.varlen_flash import training_attention
from longspec.kernels.training.varlen_torch import TorchAttention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def segments_of(lengths: list[int], lags: list[int] | None = None, device: str = "cpu") -> Segments:
    return Segments([0, *accumulate(lengths)], torch.device(device), lags)


def make_inputs(lengths: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    return [torch.randn(tokens, h, head_dim, generator=generator) for h in (heads, kv_heads, kv_heads)]


def attention_of(q: Tensor) -> TorchAttention:
    return training_attention(q.device, q.dtype, q.shape[-1], use_flash=True)


@pytest.fixture(params=["torch", "flash", pytest.param("cuda", marks=pytest.mark.gpu)])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchAttention, str]:
    """An attention and its device. On the CPU dense attention stands in for FlashAttention's kernels."""
    if request.param == "flash":
        monkeypatch.setattr(varlen_flash, "_forward", reference.flash_forward)
        monkeypatch.setattr(varlen_flash, "_backward", reference.flash_backward)
        return varlen_flash.FlashAttention(False), "cpu"
    device = "cuda" if request.param == "cuda" else "cpu"
    return attention_of(torch.empty(1, 1, 16, device=device)), device


def check(inputs: list[Tensor], attend: Attention, expected: Attention, device: str, learn: int = 3) -> None:
    """`attend(q, k, v)` in fp32 on the device and its gradients equal `expected(q, k, v)` in fp64 on the CPU.

    learn: how many of q, k, v have a gradient.
    """
    exact = [x.double().requires_grad_(number < learn) for number, x in enumerate(inputs)]
    leaves = [x.clone().to(device).requires_grad_(number < learn) for number, x in enumerate(inputs)]
    truth, got = expected(*exact), attend(*leaves)
    torch.testing.assert_close(got.cpu().double(), truth, atol=1e-5, rtol=1e-5)

    weight = torch.randn(truth.shape, generator=torch.Generator().manual_seed(9))
    (truth * weight).sum().backward()
    (got * weight.to(device)).sum().backward()
    for leaf, exact_leaf in zip(leaves[:learn], exact, strict=False):
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # None: no query saw any key
        torch.testing.assert_close(gradient.cpu().double(), exact_leaf.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "window", "lags"),
    [
        ([7], None, None),
        ([1, 40, 1, 90, 65, 64], None, None),
        ([100, 100, 100], None, [3, 3, 3]),
        ([200, 150, 31, 60, 200], None, [1, 2, 3, 4, 5]),
        ([3, 5, 6, 1, 20], None, [5, 5, 5, 1, 2]),
        ([30, 9, 300], 8, None),
        ([400, 700], 100, None),
        ([400, 30, 2, 400], 20, [1, 5, 3, 4]),
        ([50, 50], 2, [3, 1]),
        ([30, 4, 1, 50], 7, [2, 2, 2, 2]),
        ([1100, 3], 512, None),
        ([513], 512, None),
        ([514, 513], 512, None),
    ],
)
def test_values_and_gradients_equal_dense_attention(
    lengths: list[int], window: int | None, lags: list[int] | None, attention: tuple[TorchAttention, str]
) -> None:
    """Packed segments, single tokens, segments shorter than their lag, windows narrower than the lag."""
    attend, device = attention
    segments, cpu_segments = segments_of(lengths, lags, device), segments_of(lengths, lags)
    check(
        make_inputs(lengths),
        lambda q, k, v: attend.varlen(q, k, v, segments, 0.3, window),
        lambda q, k, v: reference.dense_attention(q, k, v, reference.causal_mask(cpu_segments, window), 0.3),
        device,
    )


@pytest.mark.parametrize("lengths", [[1, 3, 4, 5, 9, 70], [9, 33], [1100, 600], [8], [12, 7], [4]])
def test_block_attention_equals_dense_attention(lengths: list[int], attention: tuple[TorchAttention, str]) -> None:
    attend, device = attention
    segments, cpu_segments = segments_of(lengths, device=device), segments_of(lengths)
    check(
        make_inputs(lengths),
        lambda q, k, v: attend.block(q, k, v, segments, 0.3),
        lambda q, k, v: reference.dense_attention(q, k, v, reference.block_mask(cpu_segments), 0.3),
        device,
        learn=1,
    )
