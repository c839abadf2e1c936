"""Products of few tokens and what is fused with them, in Triton's interpreter and on the GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import TOLERANCE, random
from layer_reference import rms_norm, swiglu

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton import skinny_product as skinny
from longspec.kernels.triton.layers import TritonStream, linear
from longspec.kernels.triton.skinny_product import split_product


def skip_what_the_interpreter_cannot(dtype: torch.dtype, device: str, tokens: int = 2) -> None:
    if dtype == torch.bfloat16 and device == "cpu" and tokens > 1:
        pytest.skip("Triton's interpreter has no bf16 dot")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "rows", "width"),
    [
        *((1, 10, 32), (1, 6, 2100), (1, 2, 1), (1, 4, 18944), (1, 10, 576), (1, 2, 100)),
        *((2, 70, 96), (16, 128, 256), (17, 330, 40), (64, 256, 32), (69, 330, 40)),
    ],
)
def test_linear_equals_torchs(tokens: int, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """With a bias and without one, for sizes that are multiples of the blocks and others."""
    skip_what_the_interpreter_cannot(dtype, device, tokens)
    x = random(1, tokens, width).to(device, dtype)
    weight = (random(rows, width, seed=1) / width**0.5).to(device, dtype)
    for bias in (None, random(rows, seed=3).to(device, dtype)):
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = linear(x, weight, bias)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [256, 512])
def test_a_split_product_is_the_sum_of_its_parts(
    width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_what_the_interpreter_cannot(dtype, device)
    monkeypatch.setattr(skinny, "describe_gpu", lambda device: describe_gpu(device)._replace(multiprocessors=132))
    x, weight = random(64, width).to(device, dtype), (random(96, width, seed=1) / width**0.5).to(device, dtype)
    parts = split_product(x, weight)
    assert parts.dtype == torch.float32 and len(parts) == (4 if width == 512 else 2)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(parts.sum(0).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [*((10, width) for width in (64, 100, 576, 1536, 2100)), (8, 18944)])
def test_one_token_is_normalized_in_its_product_or_before(
    rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """Rounded as transformers does; a program that reaches past the last row changes nothing."""
    x, norm = (3 * random(1, 1, width)).to(device, dtype), random(width, seed=1).to(device, dtype)
    weight = (random(rows, width, seed=2) / width**0.5).to(device, dtype)
    expected, stream = rms_norm(x, norm, 1e-3).double() @ weight.double().t(), TritonStream(x, 1e-3)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(stream.project(norm, weight, None).double(), expected, **close)
    torch.testing.assert_close(
        stream.project_gated(norm, weight).double(), swiglu(*expected.chunk(2, -1)).double(), **close
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("batch", "nodes", "width", "inner"),
    [
        # One vector: shorter than the shortest one that a program takes at once, and longer.
        *((1, 1, width, inner) for width in (24, 72) for inner in (40, 100)),
        *((2, 3, 24, 40), (1, 17, 256, 128), (1, 64, 96, 512), (1, 69, 40, 2), (1, 17, 192, 66), (1, 69, 96, 70)),
        (2, 50, 24, 40),
    ],
)
def test_the_residual_stream_equals_plain_sums_for_any_number_of_tokens(
    batch: int, nodes: int, width: int, inner: int, dtype: torch.dtype, device: str
) -> None:
    """Two branches and a last one, which are added in different ways."""
    skip_what_the_interpreter_cannot(dtype, device, batch * nodes)
    hidden = random(batch, nodes, width).to(device, dtype)
    norm = random(width, seed=1).to(device, dtype)
    first = (random(inner, width, seed=2) / width**0.5).to(device, dtype)
    gate_up = (random(2 * inner, width, seed=3) / width**0.5).to(device, dtype)
    back = (random(width, inner, seed=4) / inner**0.5).to(device, dtype)
    x = hidden.double()
    for project in (lambda y: y @ first.double().t(), lambda y: swiglu(*(y @ gate_up.double().t()).chunk(2, -1))):
        x = x + project(rms_norm(x, norm.double(), 1e-5)) @ back.double().t()
    expected = x + x.new_ones(batch, nodes, inner) @ back.double().t()
    stream = TritonStream(hidden, 1e-5)
    stream.add_product(stream.project(norm, first, None), back)
    stream.add_product(stream.project_gated(norm, gate_up), back)
    close = {"rtol": 3 * TOLERANCE[dtype], "atol": 3 * TOLERANCE[dtype]}
    torch.testing.assert_close(stream.normed(norm).double(), rms_norm(x, norm.double(), 1e-5), **close)
    stream.add_product(hidden.new_ones(batch, nodes, inner), back, last=True)
    torch.testing.assert_close(stream.hidden.double(), expected, **close)
