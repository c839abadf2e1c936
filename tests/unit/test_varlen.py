"""Training attention: values and gradients against dense attention in fp64, and FlashAttention's kernels."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import training_reference as reference
from kernel_devices import INTERPRETED
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.errors import warn_once
from longspec.kernels.training import torch_flash, varlen_flash
from longspec.kernels.training.segments import Segments
from longspec.kernels.training.varlen_flash import FlashAttention, training_attention
from longspec.kernels.training.varlen_torch import TorchAttention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def segments_of(lengths: list[int], lags: list[int] | None = None, device: str = "cpu") -> Segments:
    return Segments([0, *accumulate(lengths)], torch.device(device), lags)


def make_inputs(
    lengths: list[int], heads: int = 6, kv_heads: int = 2, head_dim: int = 24, steps: int = 1
) -> list[Tensor]:
    """q, k and v; k and v of `steps` steps after each other."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths)
    shapes = (tokens, heads), (steps * tokens, kv_heads), (steps * tokens, kv_heads)
    return [torch.randn(*shape, head_dim, generator=generator) for shape in shapes]


def attention_of(q: Tensor) -> TorchAttention:
    return training_attention(q.device, q.dtype, q.shape[-1], use_flash=True)


@pytest.fixture(params=["torch", pytest.param("flash", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[TorchAttention, str]:
    """An attention and its device. On the CPU dense attention stands in for FlashAttention's kernels."""
    if request.param == "flash":
        monkeypatch.setattr(torch_flash, "flash_forward", reference.flash_forward)
        monkeypatch.setattr(torch_flash, "flash_backward", reference.flash_backward)
        return varlen_flash.FlashAttention(False), "cpu"
    device = "cuda" if request.param == "cuda" else "cpu"
    return attention_of(torch.empty(1, 1, 16, device=device)), device


def check(inputs: list[Tensor], attend: Attention, expected: Attention, device: str, learn: int = 3) -> None:
    """`attend(q, k, v)` in fp32, checkpointed, and its gradients equal `expected(q, k, v)` in fp64 on the CPU. learn:
    how many of q, k, v have a gradient."""
    exact = [x.double().requires_grad_(number < learn) for number, x in enumerate(inputs)]
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    leaves = [x.to(device).requires_grad_(number < learn) for number, x in enumerate(strided)]
    truth, got = expected(*exact), checkpoint(attend, *leaves, use_reentrant=False)
    torch.testing.assert_close(got.cpu().double(), truth, atol=1e-5, rtol=1e-5)

    weight = torch.randn(truth.shape[::-1], generator=torch.Generator().manual_seed(9)).permute(2, 1, 0)
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
    """With the frozen keys and values of a target, and with some that learn."""
    attend, device = attention
    segments, cpu_segments = segments_of(lengths, device=device), segments_of(lengths)
    for learn in (1, 3):
        check(
            make_inputs(lengths),
            lambda q, k, v: attend.block(q, k, v, segments, 0.3),
            lambda q, k, v: reference.dense_attention(q, k, v, reference.block_mask(cpu_segments), 0.3),
            device,
            learn,
        )


@pytest.mark.parametrize("window", [10**6, 16, 1])
@pytest.mark.parametrize("lengths", [[1, 3, 4, 5, 70], [9, 33], [600, 2, 257], [3, 2]])
def test_steps_of_training_time_test_equal_dense_attention(
    lengths: list[int], window: int, attention: tuple[TorchAttention, str]
) -> None:
    """The keys of later steps count as further keys; segments and windows shorter than the steps."""
    attend, device = attention
    segments = segments_of(lengths, device=device)
    for steps in (1, 2, 5):
        mask = reference.steps_mask(segments_of(lengths), steps, window)
        check(
            make_inputs(lengths, steps=steps),
            lambda q, k, v, n=steps: attend.steps(q, k.chunk(n), v.chunk(n), segments, 0.3, window),
            lambda q, k, v, m=mask: reference.dense_attention(q, k, v, m, 0.3),
            device,
        )


def test_other_head_sizes_and_a_missing_triton_fall_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    flash, plain, segments = FlashAttention(False), TorchAttention(), segments_of([30])
    for head_dim, has_triton in ((20, True), (264, True), (24, False)):
        monkeypatch.setattr(varlen_flash, "is_installed", lambda _, has=has_triton: has)
        q, k, v = make_inputs([30], head_dim=head_dim)
        call = q, [k], [v], segments, 0.3, 8
        assert torch.equal(flash.steps(*call), plain.steps(*call))
    assert torch.equal(flash.block(q, k, v, segments, 0.3), plain.block(q, k, v, segments, 0.3))
    assert "triton is not installed" in caplog.text


def test_torchs_kernel_is_called_with_its_schema() -> None:
    """On meta tensors: the operations exist, take these arguments and return tensors of the expected shapes."""
    lengths = [30, 4, 50]
    segments = segments_of(lengths, [4, 4, 4])
    q, k, v = (x.to("meta", torch.bfloat16) for x in make_inputs(lengths))
    segments.query_bounds = segments.query_bounds.to("meta")  # type: ignore[misc]  # computed once
    segments.keys = segments.keys._replace(bounds=segments.keys.bounds.to("meta"))  # type: ignore[misc]
    k, v = k[: len(segments.keys.rows)], v[: len(segments.keys.rows)]
    for reach in (-1, 16):
        out, lse, *state = torch_flash.flash_forward(q, k, v, segments, 0.3, reach)
        assert out.shape == q.shape and lse.shape == (q.shape[1], len(q))
        dq, dk, _ = torch_flash.flash_backward(out, (q, k, v, out, lse, *state), segments, 0.3, reach)
        assert dq.shape == q.shape and dk.shape == k.shape


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.bfloat16, 128), (torch.bfloat16, 40)])
def test_half_precision_on_the_gpu(dtype: torch.dtype, head_dim: int) -> None:
    """Values and gradients; lags longer than their segments; first blocks; steps of training-time test."""
    agree = partial(agree_on_gpu, dtype=dtype, head_dim=head_dim)
    lengths, lags = [700, 64, 3, 1300, 1], [5, 1, 4, 2, 3]
    for window, lag in [(None, None), (None, lags), (512, None)]:
        segments = segments_of(lengths, lag, "cuda")
        assert type(attention_of(torch.empty(1, 8, head_dim, device="cuda", dtype=dtype))) is FlashAttention
        mask = reference.causal_mask(segments_of(lengths, lag), window)
        agree(lengths, mask, lambda q, k, v, s=segments, w=window: attention_of(q).varlen(q, k, v, s, 0.125, w))
    segments = segments_of(lengths, device="cuda")
    mask = reference.block_mask(segments_of(lengths))
    for learn in (1, 3):  # with the frozen keys of a target, too
        agree(lengths, mask, lambda q, k, v: attention_of(q).block(q, k, v, segments, 0.125), learn=learn)
    for steps, window in ((1, 4096), (3, 4096), (5, 512)):
        mask = reference.steps_mask(segments_of(lengths), steps, window)

        def attend(q: Tensor, k: Tensor, v: Tensor, n: int = steps, window: int = window) -> Tensor:
            return attention_of(q).steps(q, k.chunk(n), v.chunk(n), segments, 0.125, window)

        agree(lengths, mask, attend, steps=steps)
    with torch.no_grad():  # the target's pass
        inputs = [x.to(dtype) for x in make_inputs(lengths, 8, 2, head_dim)]
        got = attention_of(inputs[0].cuda()).varlen(*(x.cuda() for x in inputs), segments, 0.125)
        exact = [x.double() for x in inputs]
        expected = reference.dense_attention(*exact, reference.causal_mask(segments_of(lengths)), 0.125)
        torch.testing.assert_close(got.cpu().double(), expected, atol=3e-2, rtol=3e-2)


def agree_on_gpu(
    lengths: list[int],
    mask: Tensor,
    attend: Callable[..., Tensor],
    dtype: torch.dtype,
    head_dim: int,
    steps: int = 1,
    learn: int = 3,
) -> None:
    """`check` in half precision."""
    inputs = [x.to(dtype) for x in make_inputs(lengths, head_dim=head_dim, steps=steps)]
    exact = [x.double().requires_grad_(number < learn) for number, x in enumerate(inputs)]
    leaves = [x.cuda().requires_grad_(number < learn) for number, x in enumerate(inputs)]
    expected, got = reference.dense_attention(*exact, mask, 0.125), attend(*leaves)
    torch.testing.assert_close(got.cpu().double(), expected, atol=3e-2, rtol=3e-2)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    (expected * weight).sum().backward()
    (got * weight.cuda()).sum().backward()
    for leaf, truth in zip(leaves[:learn], exact, strict=False):
        error = (leaf.grad.cpu().double() - truth.grad).norm() / truth.grad.norm()
        assert error < 2e-2, error


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device() -> None:
    lengths = [700, 64, 1300]
    q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in make_inputs(lengths, 8, 2, 64))
    attention_of(q).varlen(q, k, v, segments_of(lengths, [1, 2, 3], "cuda"), 0.125).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_of(q).varlen(q, k, v, segments_of(lengths, [3, 1, 2], "cuda"), 0.125).sum().backward()
        attention_of(q).varlen(q, k, v, segments_of(lengths, device="cuda"), 0.125, window=512).sum().backward()
        steps = [k, k, k], [v, v, v]
        attention_of(q).steps(q, *steps, segments_of(lengths, device="cuda"), 0.125, 512).sum().backward()
        frozen = k.detach(), v.detach()
        attention_of(q).block(q, *frozen, segments_of(lengths, device="cuda"), 0.125).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "head_dim"), [([700, 64, 3, 1300, 1], 64), ([33], 128), ([128, 256], 40)])
def test_the_flash_attn_package_equals_the_reference(lengths: list[int], head_dim: int) -> None:
    """Values and gradients of the installed package, with lags, with a window, and with neither."""
    package = pytest.importorskip("flash_attn")
    if varlen_flash.installed_flash_attention() == "flash_attention_2":
        assert varlen_flash._installed_varlen() is package.flash_attn_varlen_func
    for window, lag in [(None, None), (None, [2] * len(lengths)), (512, None)]:
        segments = segments_of(lengths, lag, "cuda")
        reach = -1 if window is None else window

        def attend(q: Tensor, k: Tensor, v: Tensor, s: Any = segments, reach: int = reach) -> Tensor:
            return varlen_flash._run(package.flash_attn_varlen_func, q, k, v, s, 0.125, reach)

        mask = reference.causal_mask(segments_of(lengths, lag), window)
        agree_on_gpu(lengths, mask, attend, torch.bfloat16, head_dim)
