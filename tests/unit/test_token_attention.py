"""Attention of one token and of a tree: parts of a prefix, and captured calls. test_attention has dense references."""

import attention_reference
import pytest
import torch
from kernel_devices import INTERPRETED, TOLERANCE, random
from test_attention import FLASH, some_mask
from torch import Tensor

pytest.importorskip("triton")

from longspec.kernels.choice import choose_backend
from longspec.kernels.shared.attention import PrefixParts
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.triton.attention_tiles import Tiles
from longspec.kernels.triton.token_attention import token_attention
from longspec.kernels.triton.tree_attention import prefix_and_tree_attention

pytestmark = pytest.mark.kernel

Shape = tuple[int, int, int, bool]
"""KV heads, query heads per KV head, head_dim, and whether heads have norms."""
TILES = Tiles(16, 16, 4, 2)


def check(
    lengths: list[int], shape: Shape, splits: int, dtype: torch.dtype, device: str, slots: list[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare result, cache and counters; all slots but those of the prefix hold NaN. Returns result and cache."""
    kv_heads, group, head_dim, with_norms = shape
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
    ("lengths", "heads", "splits"),
    [
        ([0, 1, 40], (2, 6, 32), 3),
        ([100, 3], (3, 3, 64), 4),
        ([50], (1, 1, 96), 1),
        ([33], (1, 5, 16), 7),
        ([40, 7], (1, 20, 32), 3),  # more heads than a tile has rows
    ],
)
def test_equals_its_reference_over_odd_shapes(
    lengths: list[int], heads: tuple[int, int, int], splits: int, with_norms: bool, device: str
) -> None:
    """Ragged batches, empty prefixes and parts; NaN in every slot that must not be read; nothing else is stored."""
    check(lengths, (*heads, with_norms), splits, torch.float32, device)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=INTERPRETED),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE),
    ],
)
def test_half_precision_accumulates_in_fp32(dtype: torch.dtype, device: str) -> None:
    check([70, 5], (2, 4, 128 if device == "cuda" else 32, True), 3, dtype, device)


def test_a_negative_slot_stores_nothing(device: str) -> None:
    """The token still sees itself."""
    _, keys, values = check([4, 7], (1, 2, 32, False), 2, torch.float32, device, slots=[-1, 7])
    assert keys[0, :, 4:].isnan().all() and values[0, :, 4:].isnan().all()
    assert keys[1, :, 7].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 6, 128), (3, 3, 64), (8, 4, 128)])
def test_parts_of_all_programs_are_seen_by_the_last_of_them(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Many replays, because the order of arrival differs between them; rows of very different lengths."""
    first = check([9000, 1, 63, 4097], (*heads, False), 32, dtype, "cuda")[0]
    for _ in range(30):
        assert torch.equal(check([9000, 1, 63, 4097], (*heads, False), 32, dtype, "cuda")[0], first)


BLOCK = 48


def make_case(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, parts: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k, v, lengths, mask, outputs and LSEs of the parts. All strides differ. Slots that the kernel must not read
    hold NaN, and so does every third part, which is empty."""
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


CUDA_BACKENDS = ["triton", pytest.param("flash", marks=pytest.mark.skipif(not FLASH, reason="needs fa3-fwd"))]


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [7, 69])
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_captured_calls_follow_lengths_mask_and_keys(backend: str, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CUDA graph of all calls, replayed after all inputs have changed, equals eager calls. None of them waits."""
    from longspec.kernels.triton import flash_attention

    monkeypatch.setattr(flash_attention, "FLASH_FROM", (0, 0, 0))
    dtype = torch.bfloat16 if backend == "flash" else torch.float16
    attend = choose_backend(backend, torch.device("cuda"), dtype, 128).attention
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    q, k, v = random(2, nodes, 8, 128).transpose(1, 2), random(2, 2, 3000, 128), random(2, 2, 3000, 128)
    ring_k, ring_v = random(2, 2, 512 + nodes, 128), random(2, 2, 512 + nodes, 128)
    lengths = torch.tensor([2900, 100], dtype=torch.int32, device="cuda")
    tree_mask = torch.ones(2, nodes, nodes, dtype=torch.bool, device="cuda").tril()

    def run() -> tuple[Tensor, ...]:
        return (
            attend.hybrid(lengths, tree_mask)(q, k, v, 0.1),
            attend.prefix(q, k, v, lengths, 0.1),
            attend.window(q, ring_k, ring_v, lengths, 2, tree_mask, 0.1),
            attend.prefill(q, k, v, 0.1),
        )

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for rows in ([17, 3000 - nodes], [0, 0], [1024, 1]):
        lengths.copy_(torch.tensor(rows))
        tree_mask.copy_(some_mask(2, nodes, nodes))
        for x in (k, v):
            x.normal_(generator=generator)
        graph.replay()
        torch.testing.assert_close(captured, run(), rtol=0, atol=0)
