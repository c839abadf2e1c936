"""Attention of one token per sequence against its reference, in Triton's interpreter and on the GPU."""

import pytest
import torch
from kernel_devices import INTERPRETED, TOLERANCE, random
from torch import Tensor

pytest.importorskip("triton")

import attention_reference

from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.triton.attention_tiles import Tiles
from longspec.kernels.triton.token_attention import token_attention

pytestmark = pytest.mark.kernel

TILES = Tiles(16, 16, 4, 2)


def check(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    splits: int,
    dtype: torch.dtype,
    device: str,
    with_norms: bool = False,
    slots: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the result, the cache and the counters; all slots but those of the prefix hold NaN. Returns the result
    and the cache."""
    batch, capacity = len(lengths), max(lengths) + 5
    keys = torch.full((batch, kv_heads, capacity, head_dim), torch.nan)
    values = torch.full((capacity, batch, kv_heads, head_dim + 8), torch.nan).permute(1, 2, 0, 3)[..., :head_dim]
    for row, length in enumerate(lengths):
        keys[row, :, :length], values[row, :, :length] = random(2, kv_heads, length, head_dim, seed=row)
    qkv = random(batch, 1, (group + 2) * kv_heads * head_dim, seed=5)
    angle = random(capacity, head_dim // 2, seed=6).repeat(1, 2)
    norms = random(2, head_dim, seed=7, dtype=dtype, device=device)
    qkv, keys, values, cos, sin = (x.to(device, dtype) for x in (qkv, keys, values, angle.cos(), angle.sin()))
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    numbers = used[:, None].long() if slots is None else torch.tensor(slots, device=device)[:, None]
    arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=device)
    weights, found = HeadNorms(*norms, 1e-2) if with_norms else None, []
    for function, launch in ((attention_reference.token_attention, ()), (token_attention, (arrivals, splits, TILES))):
        stores = keys.clone(), values.clone()
        given = TokenSlots(used[:, None].long(), (cos, sin), *stores, numbers)
        found.append((function(qkv, given, used, 0.15, weights, *launch), *stores))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found[1], found[0], atol=tolerance, rtol=tolerance, equal_nan=True)
    assert found[1][0].isfinite().all() and arrivals.eq(0).all()
    return found[1]


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "head_dim", "splits"),
    [
        ([0, 1, 40], 2, 6, 32, 3),
        ([100, 3], 3, 3, 64, 4),
        ([50], 1, 1, 96, 1),
        ([33], 1, 5, 16, 7),
        ([40, 7], 1, 20, 32, 3),  # more heads than a tile has rows
    ],
)
def test_equals_its_reference_over_odd_shapes(
    lengths: list[int], kv_heads: int, group: int, head_dim: int, splits: int, with_norms: bool, device: str
) -> None:
    """Ragged batches, empty prefixes and parts; NaN in every slot that must not be read; nothing else is stored."""
    check(lengths, kv_heads, group, head_dim, splits, torch.float32, device, with_norms)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=INTERPRETED),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE),
    ],
)
def test_half_precision_accumulates_in_fp32(dtype: torch.dtype, device: str) -> None:
    check([70, 5], 2, 4, 128 if device == "cuda" else 32, 3, dtype, device, with_norms=True)


def test_a_negative_slot_stores_nothing(device: str) -> None:
    """The token still sees itself."""
    _, keys, values = check([4, 7], 1, 2, 32, 2, torch.float32, device, slots=[-1, 7])
    assert keys[0, :, 4:].isnan().all() and values[0, :, 4:].isnan().all()
    assert keys[1, :, 7].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), [(2, 6, 128), (3, 3, 64), (8, 4, 128)])
def test_parts_of_all_programs_are_seen_by_the_last_of_them(
    kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Many replays, because the order of arrival differs between them; rows of very different lengths."""
    first = check([9000, 1, 63, 4097], kv_heads, group, head_dim, 32, dtype, "cuda")[0]
    for _ in range(30):
        again = check([9000, 1, 63, 4097], kv_heads, group, head_dim, 32, dtype, "cuda")[0]
        assert torch.equal(again, first)
