"""Matrix products of one row and of a few, with the operations fused into them, against their references in fp64."""

import layer_reference
import product_reference
import pytest
import torch
from kernel_devices import TOLERANCE, random

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton import skinny_product as skinny
from longspec.kernels.triton.elementwise import rms_norm
from longspec.kernels.triton.layers import TritonStream
from longspec.kernels.triton.skinny_product import skinny_product, split_product
from longspec.kernels.triton.vector_product import vector_product


def skip_what_the_interpreter_cannot(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bf16 dot")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [(10, 32), (6, 2100), (2, 1), (4, 18944), (10, 576), (2, 100)])
@pytest.mark.parametrize("gated", [False, True])
def test_vector_product_equals_its_reference(
    rows: int, width: int, gated: bool, dtype: torch.dtype, device: str
) -> None:
    x = random(1, 1, width).to(device, dtype)
    weight = (random(rows, width, seed=1) / width**0.5).to(device, dtype)
    bias = None if gated else random(rows, seed=3).to(device, dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    expected = product_reference.vector_product(x, weight, bias, gated)
    torch.testing.assert_close(vector_product(x, weight, bias, gated), expected, **close)

    start = random(*expected.shape, seed=4).to(device, dtype)
    expected_sum = product_reference.vector_product(x, weight, bias, gated, add_to=start.clone())
    assert vector_product(x, weight, bias, gated, add_to=start) is start
    torch.testing.assert_close(start, expected_sum, **close)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "rows", "width"), [(2, 70, 96), (17, 128, 256), (64, 96, 512), (69, 2, 40), (17, 66, 192), (69, 70, 96)]
)
def test_skinny_products_equal_their_references(
    tokens: int, rows: int, width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bias, gated, and in two or four parts; for sizes that are multiples of the blocks and others."""
    skip_what_the_interpreter_cannot(dtype, device)
    for module in (skinny, product_reference):
        monkeypatch.setattr(module, "describe_gpu", lambda device: describe_gpu(device)._replace(multiprocessors=132))
    x = random(tokens, width).to(device, dtype)
    weight = (random(rows, width, seed=1) / width**0.5).to(device, dtype)
    bias = random(rows, seed=2).to(device, dtype)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}

    expected = product_reference.skinny_product(x, weight, bias)
    torch.testing.assert_close(skinny_product(x, weight, bias), expected, **close)
    expected = product_reference.skinny_product(x, weight, gated=True)
    torch.testing.assert_close(skinny_product(x, weight, gated=True), expected, **close)

    parts, expected_parts = split_product(x, weight), product_reference.split_product(x, weight)
    assert parts.dtype == torch.float32 and len(parts) == len(expected_parts) == (4 if width == 512 else 2)
    torch.testing.assert_close(parts.sum(0), expected_parts.sum(0), **close)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [64, 100, 576, 1536])
@pytest.mark.parametrize("gated", [False, True])
def test_a_short_vector_is_normalized_in_its_product(width: int, gated: bool, dtype: torch.dtype, device: str) -> None:
    """Rounded as transformers does; a program that reaches past the last row changes nothing."""
    x, norm = (3 * random(1, 1, width)).to(device, dtype), random(width, seed=1).to(device, dtype)
    weight = (random(10, width, seed=2) / width**0.5).to(device, dtype)
    expected = product_reference.vector_product(x, weight, gated=gated, norm=norm, eps=1e-3)
    got = vector_product(x, weight, gated=gated, norm=norm, eps=1e-3)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_normalized_vector_is_rounded_before_its_weight_and_after(dtype: torch.dtype, device: str) -> None:
    """The product with the identity is the norm, but for sums of squares in another order."""
    x, norm = (3 * random(1, 1, 256)).to(device, dtype), random(256, seed=1).to(device, dtype)
    got = vector_product(x, torch.eye(256, dtype=dtype, device=device), norm=norm, eps=1e-3)
    assert (got != rms_norm(x, norm, 1e-3)).float().mean() < 0.03


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("batch", "nodes", "width"), [(1, 1, 24), (1, 1, 72), (2, 3, 24), (2, 50, 24)])
def test_the_residual_stream_equals_plain_sums_for_any_number_of_tokens(
    batch: int, nodes: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """Two branches and a last one, which are added in different ways."""
    skip_what_the_interpreter_cannot(dtype, device)
    hidden = random(batch, nodes, width).to(device, dtype)
    norm = random(width, seed=1).to(device, dtype)
    first = (random(40, width, seed=2) / 5).to(device, dtype)
    gate_up = (random(2 * 40, width, seed=3) / 5).to(device, dtype)
    back = (random(width, 40, seed=4) / 6).to(device, dtype)
    x = hidden.double()
    for project in (
        lambda y: y @ first.double().t(),
        lambda y: layer_reference.swiglu(*(y @ gate_up.double().t()).chunk(2, -1)),
    ):
        x = x + project(layer_reference.rms_norm(x, norm.double(), 1e-5)) @ back.double().t()
    expected = x + x.new_ones(batch, nodes, 40) @ back.double().t()
    stream = TritonStream(hidden, 1e-5)
    stream.add_product(stream.project(norm, first, None), back)
    stream.add_product(stream.project_gated(norm, gate_up), back)
    close = {"rtol": 3 * TOLERANCE[dtype], "atol": 3 * TOLERANCE[dtype]}
    torch.testing.assert_close(stream.normed(norm).double(), layer_reference.rms_norm(x, norm.double(), 1e-5), **close)
    stream.add_product(hidden.new_ones(batch, nodes, 40), back, last=True)
    torch.testing.assert_close(stream.hidden.double(), expected, **close)
