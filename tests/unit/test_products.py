"""Matrix products of one row and of a few, with the operations fused into them, against their references in fp64."""

from collections.abc import Callable
from typing import Any

import product_reference
import pytest
import torch
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton import skinny_product as skinny
from longspec.kernels.triton import vector_product as vector
from longspec.kernels.triton.layers import TritonStream
from longspec.kernels.triton.skinny_product import count_parts, skinny_product, split_product
from longspec.kernels.triton.vector_product import vector_product

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def skip_what_the_interpreter_cannot(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bf16 dot")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gate(values: Tensor) -> Tensor:
    low, high = values.chunk(2, -1)
    return torch.nn.functional.silu(low) * high


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (12, 32),
        (10, 32),
        (6, 2100),
        (4, 4096),
        (2, 1),
        (4, 5120),
        (4, 27648),
        (8, 3584),
        (4, 18944),
        (4, 1792),
        (6, 768),
    ],
)
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


class Recorded:
    """A kernel that keeps the arguments of its launches instead of running."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **settings: self.launches.append((grid, settings))


@pytest.mark.parametrize(
    ("rows", "width", "gated", "programs", "settings"),
    [
        # Multiples of 2048 and smaller powers of two have no tail.
        (4096, 4096, False, 1024, {"EVEN": True, "TAIL": 0, "BLOCK_N": 4, "BLOCK_K": 2048}),
        (14336, 4096, True, 7168, {"EVEN": True, "TAIL": 0, "BLOCK_N": 2, "BLOCK_K": 2048}),
        (4096, 14336, False, 1024, {"EVEN": True, "TAIL": 0, "BLOCK_N": 4, "BLOCK_K": 2048}),
        (512, 256, False, 128, {"EVEN": True, "TAIL": 0, "BLOCK_N": 4, "BLOCK_K": 256}),
        # QwQ-32B and Qwen2-7B
        (5120, 5120, False, 1280, {"EVEN": True, "TAIL": 1024, "BLOCK_N": 4, "BLOCK_K": 2048}),
        (5120, 27648, False, 1280, {"EVEN": True, "TAIL": 1024, "BLOCK_N": 4, "BLOCK_K": 2048}),
        (18944, 3584, True, 9472, {"EVEN": True, "TAIL": 1536, "BLOCK_N": 2, "BLOCK_K": 2048}),
        (3584, 18944, False, 896, {"EVEN": True, "TAIL": 512, "BLOCK_N": 4, "BLOCK_K": 2048}),
        # No multiple of 256, and rows that are no multiple of the block.
        (576, 576, False, 144, {"EVEN": False, "TAIL": 0, "BLOCK_N": 4, "BLOCK_K": 1024}),
        (10, 5120, False, 3, {"EVEN": False, "TAIL": 0, "BLOCK_N": 4, "BLOCK_K": 2048}),
    ],
)
def test_a_vector_product_masks_no_load_where_pieces_of_256_columns_divide_the_width(
    rows: int, width: int, gated: bool, programs: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Recorded()
    monkeypatch.setattr(vector, "_vector_product_kernel", kernel)
    weight = torch.empty((2 if gated else 1) * rows, width, device="meta")
    vector_product(torch.empty(1, 1, width, device="meta"), weight, gated=gated)
    ((grid, launched),) = kernel.launches
    assert grid == (programs,) and {name: launched[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("tokens", "width", "parts", "block_k", "even"),
    [
        (16, 4096, 1, 128, True),
        (69, 4096, 1, 64, True),
        (69, 14336, 2, 128, True),
        (69, 18944, 2, 128, True),
        (69, 768, 4, 64, True),
        # 128 columns do not divide these widths or their halves, 64 do.
        (16, 576, 1, 64, True),
        (69, 29568, 2, 64, True),
        (16, 600, 1, 128, False),
    ],
)
def test_a_skinny_product_takes_the_longest_step_that_divides_its_parts(
    tokens: int, width: int, parts: int, block_k: int, even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Recorded()
    monkeypatch.setattr(skinny, "_skinny_product_kernel", kernel)
    x, weight = torch.empty(tokens, width, device="meta"), torch.empty(4096, width, device="meta")
    skinny._launch(x, weight, None, x, 4096, False, parts)
    ((_, launched),) = kernel.launches
    assert (launched["BLOCK_K"], launched["EVEN"]) == (block_k, even)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [2, 16, 17, 64, 65, 69, 80])
@pytest.mark.parametrize(("rows", "width"), [(70, 96), (128, 256), (96, 512), (2, 40), (66, 192)])
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


def test_a_small_weight_gets_more_parts_each_of_whole_blocks() -> None:
    assert count_parts(4096, 14336, multiprocessors=132) == 2  # 64 programs per part
    assert count_parts(768, 1536, multiprocessors=132) == 4
    assert count_parts(768, 64 * 7, multiprocessors=132) == 2  # neither 4 nor 3 divides seven blocks
    assert count_parts(768, 64 * 9, multiprocessors=132) == 3


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (2, 3), (2, 50)])
def test_the_residual_stream_equals_plain_sums_for_any_number_of_tokens(
    batch: int, nodes: int, dtype: torch.dtype, device: str
) -> None:
    """Two branches and a last one, which are added in different ways."""
    skip_what_the_interpreter_cannot(dtype, device)
    hidden, width = random(batch, nodes, 24).to(device, dtype), 24
    norm = random(width, seed=1).to(device, dtype)
    first = (random(40, width, seed=2) / 5).to(device, dtype)
    gate_up = (random(2 * 40, width, seed=3) / 5).to(device, dtype)
    back = (random(width, 40, seed=4) / 6).to(device, dtype)
    x = hidden.double()
    for project in (lambda y: y @ first.double().t(), lambda y: gate(y @ gate_up.double().t())):
        x = x + project(rms(x, norm.double(), 1e-5)) @ back.double().t()
    expected = x + x.new_ones(batch, nodes, 40) @ back.double().t()
    stream = TritonStream(hidden, 1e-5)
    stream.add_product(stream.project(norm, first, None), back)
    stream.add_product(stream.project_gated(norm, gate_up), back)
    close = {"rtol": 3 * TOLERANCE[dtype], "atol": 3 * TOLERANCE[dtype]}
    torch.testing.assert_close(stream.normed(norm).double(), rms(x, norm.double(), 1e-5), **close)
    stream.add_product(hidden.new_ones(batch, nodes, 40), back, last=True)
    torch.testing.assert_close(stream.hidden.double(), expected, **close)
