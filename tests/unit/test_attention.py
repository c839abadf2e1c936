"""Every backend of decoding attention against one dense fp64 attention; Triton's in its interpreter without a GPU."""

import importlib.util
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_reference import attention_with_lse
from kernel_devices import INTERPRETED, TOLERANCE
from torch import Tensor

from longspec.kernels.choice import choose_backend
from longspec.kernels.native.backend import NativeAttention
from longspec.kernels.torch.attention import DecodingAttention

FLASH = importlib.util.find_spec("fa3_fwd_interface") is not None
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "sdpa cpu": [],
    "native cpu": [pytest.mark.gcc],
    "triton cpu": [INTERPRETED],
    "sdpa cuda": [pytest.mark.gpu],
    "triton cuda": [pytest.mark.gpu],
    "flash cuda": [pytest.mark.gpu, pytest.mark.skipif(not FLASH, reason="needs fa3-fwd")],
}
BACKENDS = [pytest.param(name, marks=marks) for name, marks in MARKS.items()]
DTYPES = {
    "native cpu": [torch.float32],
    "triton cpu": [torch.float32, torch.float16],  # the interpreter has no bf16
    "flash cuda": [torch.bfloat16],
}
"""Those that a backend takes; by default all of TOLERANCE."""
SHAPES = [(2, 1, 1, 64), (1, 4, 37, 64), (2, 5, 5, 128), (1, 8, 20, 80)]
LARGE = [((1, 4, 69, 64), [95, 3]), ((1, 5, 69, 128), [60, 64]), ((1, 1, 150, 16), [130]), ((1, 2, 3, 256), [96, 1])]
Shape = tuple[int, int, int, int]
"""KV heads, query heads per KV head, nodes and head_dim."""
Attend = tuple[DecodingAttention, str]
"""A backend and its device."""
GPU_HEADS = [(64, 8), (80, 1), (80, 5), (128, 4), (128, 5), (256, 2)]
"""head_dim and query heads per KV head."""


@pytest.fixture
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """A backend and its device. Short prefixes are split too, and FlashAttention-3 takes caches of any size."""
    backend, device = request.param.split()
    if backend == "sdpa":
        return DecodingAttention(), device
    if backend == "native":
        return NativeAttention(), device
    from longspec.kernels.triton import attention as triton_attention
    from longspec.kernels.triton import flash_attention

    splits = lambda programs, capacity, at_once: 1 + min(4, max(16, at_once) // programs)  # noqa: E731
    monkeypatch.setattr(triton_attention, "count_splits", splits)
    monkeypatch.setattr(flash_attention, "FLASH_FROM", (0, 0, 0))
    if device == "cpu":
        return triton_attention.TritonAttention(), device
    return choose_backend(backend, torch.device(device), torch.bfloat16, 64).attention, device


def with_backends(*cases: Any) -> list[Any]:
    """The cases, each with every backend that takes its dtype, which is the last value."""
    sets = [case if hasattr(case, "values") else pytest.param(*case) for case in cases]
    return [
        pytest.param(name, *case.values, marks=[*marks, *case.marks])
        for name, marks in MARKS.items()
        for case in sets
        if case.values[-1] in DTYPES.get(name, TOLERANCE)
    ]


def make_cache(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, new: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q (a view of [B, N, H, D]), k, v, lengths. Slots past lengths[b] + new are NaN."""
    generator = torch.Generator().manual_seed(nodes)
    slots = max(lengths) + new + 11
    q = torch.randn(len(lengths), nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    k, v = torch.randn(2, len(lengths), kv_heads, slots, head_dim, generator=generator)
    for row, length in enumerate(lengths):
        k[row, :, length + new :] = torch.nan
        v[row, :, length + new :] = torch.nan
    return q, k, v, torch.tensor(lengths, dtype=torch.int32)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    return attention_with_lse(q.double(), k.double(), v.double(), visible, scale)[0]


def hybrid_mask(lengths: Tensor, tree_mask: Tensor, slots: int) -> Tensor:
    visible = (torch.arange(slots) < lengths[:, None, None]).repeat(1, tree_mask.shape[1], 1)
    for row, length in enumerate(lengths.tolist()):
        visible[row, :, length : length + tree_mask.shape[2]] = tree_mask[row]
    return visible


def some_mask(batch: int, nodes: int, keys: int) -> Tensor:
    return torch.rand(batch, nodes, keys, generator=torch.Generator().manual_seed(1)) < 0.5


@pytest.mark.parametrize(
    ("attend", "shape", "queries", "lengths", "dtype"),
    with_backends(
        *((shape, 37, [0, 130, 7], dtype) for shape, dtype in zip(cycle(SHAPES), 4 * [*TOLERANCE], strict=False)),
        *((shape, 150, lengths, torch.float32) for shape, lengths in LARGE),
        *(
            pytest.param((2, group, nodes, head_dim), nodes, [5000, 0, 1, 2113], dtype, marks=pytest.mark.gpu)
            for (head_dim, group), nodes, dtype in product(GPU_HEADS, (1, 69), TOLERANCE)
        ),
        (SHAPES[1], 37, [150], torch.float32),
        (SHAPES[1], 37, [90, 90], torch.float32),
        *(((2, 3, 9, 32), 4, lengths, torch.float32) for lengths in ([150], [90, 90], [0, 130, 7])),
    ),
    indirect=["attend"],
)
def test_hybrid_equals_dense_attention(
    attend: Attend, shape: Shape, queries: int, lengths: list[int], dtype: torch.dtype
) -> None:
    """For all nodes of a tree, and for the last ones."""
    (backend, device), (kv_heads, group, nodes, head_dim) = attend, shape
    q, k, v, n = make_cache(lengths, kv_heads, group, nodes, head_dim, nodes)
    tree_mask = some_mask(len(lengths), nodes, nodes)
    tree_mask[:, 0] = False
    tree_mask = tree_mask[:, -queries:]
    q, k, v = q[:, :, -queries:].to(dtype), k.to(dtype), v.to(dtype)
    expected = dense(q, k, v, hybrid_mask(n, tree_mask, k.shape[2]), 0.15)
    if backend.name == "triton":  # reads keys and values of any strides
        v = F.pad(v, (0, 3))[..., :head_dim]
    hybrid = backend.hybrid(n.to(device), tree_mask.to(device))
    got = hybrid(q.to(device), k.to(device), v.to(device), 0.15)
    assert got.dtype == dtype
    if device == "cuda" and backend.capturable:
        assert got.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


HUGE, SCALE = 1e4, 0.15
SCORES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "huge of either sign": lambda prefix, tree: (prefix[::3].fill_(HUGE), prefix[1::3].fill_(-HUGE), tree.fill_(HUGE)),
    "dominant first slot": lambda prefix, tree: prefix[:1].fill_(HUGE),
    "dominant last slot": lambda prefix, tree: prefix[-1:].fill_(HUGE),
    "dominant root": lambda prefix, tree: tree[0].fill_(HUGE),
    "prefix far below tree": lambda prefix, tree: prefix.fill_(-HUGE),
    "tree far below prefix": lambda prefix, tree: tree.fill_(-HUGE),
}
"""Changes of what is added to the scores of the slots of prefix and tree."""


@pytest.mark.parametrize(("attend", "dtype"), with_backends(*((dtype,) for dtype in TOLERANCE)), indirect=["attend"])
@pytest.mark.parametrize("kind", SCORES)
def test_huge_scores_neither_overflow_nor_vanish(kind: str, dtype: torch.dtype, attend: Attend) -> None:
    """Dimension 0 of queries and keys makes them. In fp32 a score of 1e4 has an ulp of 1e-3."""
    backend, device = attend
    for lengths, nodes in (([0, 1, 130], 33), ([65], 1)):
        q, k, v, n = make_cache(lengths, 1, 4, nodes, 64, nodes)
        q[..., 0] = (HUGE / SCALE) ** 0.5
        for row, length in enumerate(lengths):
            scores = torch.zeros(length + nodes)
            SCORES[kind](*scores.split([length, nodes]))
            k[row, :, : length + nodes, 0] = scores / (HUGE * SCALE) ** 0.5
        tree_mask = some_mask(len(lengths), nodes, nodes)
        tree_mask[:, :, 0] = True
        q, k, v = (x.to(dtype) for x in (q, k, v))
        expected = dense(q, k, v, hybrid_mask(n, tree_mask, k.shape[2]), SCALE)
        got = backend.hybrid(n.to(device), tree_mask.to(device))(*(x.to(device) for x in (q, k, v)), SCALE)
        tolerance = max(TOLERANCE[dtype], 1e-2)
        torch.testing.assert_close(got.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("attend", BACKENDS, indirect=True)
@pytest.mark.parametrize(
    ("shape", "lengths"), [*((shape, [0, 130, 7]) for shape in SHAPES), (SHAPES[1], [150]), (SHAPES[1], [0, 0])]
)
def test_prefix_equals_dense_attention(shape: Shape, lengths: list[int], attend: Attend) -> None:
    """With lengths in int32 and int64; a sequence without a prefix gives 0."""
    (backend, device), (kv_heads, group, nodes, head_dim) = attend, shape
    dtype = torch.bfloat16 if backend.name == "flash" else torch.float32
    q, k, v, n = (x.to(dtype) for x in make_cache(lengths, kv_heads, group, nodes, head_dim, 0))
    visible = (torch.arange(k.shape[2]) < n[:, None, None]).expand(-1, nodes, -1)
    expected = dense(q, k, v, visible, 0.15)
    for index_dtype in (torch.int32, torch.int64):
        got = backend.prefix(*(x.to(device) for x in (q, k, v, n.to(index_dtype))), 0.15)
        torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert all(got[row].eq(0).all() for row, length in enumerate(lengths) if length == 0)


@pytest.mark.parametrize(("attend", "dtype"), with_backends(*((dtype,) for dtype in TOLERANCE)), indirect=["attend"])
@pytest.mark.parametrize(
    ("window", "tree", "shape", "level"),
    [
        *((40, 21, (2, 4, *nodes), level) for nodes, level in (((1, 64), 0), ((16, 64), 1), ((5, 80), 4))),
        *((160, 69, (1, 4, 4, 64), 5), (40, 5, (2, 1, 1, 128), 1), (64, 21, (1, 5, 4, 80), 0)),
        *(pytest.param(512, 69, (1, 4, 16, 64), level, marks=pytest.mark.gpu) for level in (0, 1, 5)),
        *(pytest.param(512, 69, (2, 1, 1, 128), level, marks=pytest.mark.gpu) for level in (0, 1, 5)),
    ],
)
def test_window_sees_tokens_by_position_and_nodes_by_the_mask(
    window: int, tree: int, shape: Shape, level: int, dtype: torch.dtype, attend: Attend
) -> None:
    """Against explicit positions, with roots before, at and after the first turn of the ring buffer. Windows of several
    blocks and of one, in each dtype: Triton has miscompiled the loop over one block."""
    (backend, device), (kv_heads, group, nodes, head_dim) = attend, shape
    roots = [0, 7, window, window + 1, 3 * window + 13]
    generator = torch.Generator().manual_seed(nodes)
    q = torch.randn(len(roots), nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2).to(dtype)
    k, v = torch.randn(2, len(roots), kv_heads, window + tree, head_dim, generator=generator).to(dtype)
    tree_mask = some_mask(len(roots), nodes, tree)
    visible = torch.zeros(len(roots), nodes, window + tree, dtype=torch.bool)
    for row, root in enumerate(roots):
        for position in range(max(0, root + level - window), root):
            visible[row, :, position % window] = True
    visible[:, :, window:] = tree_mask
    inputs = (x.to(device) for x in (q, k, v, torch.tensor(roots, dtype=torch.int32)))
    got = backend.window(*inputs, level, tree_mask.to(device), 0.15)
    expected = dense(q, k, v, visible, 0.15)
    torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("attend", BACKENDS, indirect=True)
@pytest.mark.parametrize(
    ("shape", "slots"),
    [
        *(((2, 4, nodes, 64), slots) for nodes, slots in ((1, 1), (37, 37), (40, 100), (5, 100))),
        ((1, 5, 40, 80), 100),
        *(pytest.param((2, 4, nodes, 128), 700, marks=pytest.mark.gpu) for nodes in (1, 69)),
        pytest.param((3, 3, 512, 64), 512, marks=pytest.mark.gpu),
        pytest.param((1, 5, 300, 256), 4000, marks=pytest.mark.gpu),
    ],
)
def test_prefill_chunk_is_causal_up_to_its_end(shape: Shape, slots: int, attend: Attend) -> None:
    """Also in some rows of a larger cache, one of which has nothing before the chunk."""
    (backend, device), (kv_heads, group, nodes, head_dim) = attend, shape
    rows, ends = torch.tensor([[2, 0], [slots, nodes]], dtype=torch.int32, device=device)
    for dtype in DTYPES.get(f"{backend.name} {device}", TOLERANCE):
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(2, nodes, kv_heads * group, head_dim, generator=generator).to(dtype).transpose(1, 2)
        k, v = torch.randn(2, 2, kv_heads, slots, head_dim, generator=generator).to(dtype)
        visible = torch.ones(2, nodes, slots, dtype=torch.bool).tril(slots - nodes)
        got = backend.prefill(q.to(device), k.to(device), v.to(device), 0.1)
        expected = dense(q, k, v, visible, 0.1)
        torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        if (attend_in_chunk := backend.chunk(rows, ends)) is not None:
            visible[1] = torch.ones(nodes, slots).tril()
            k, v = (
                F.pad(x.new_zeros(3, *x.shape[1:]).index_copy(0, rows.cpu().long(), x), (0, 0, 0, 3)) for x in (k, v)
            )
            got = attend_in_chunk(q.to(device), k.to(device), v.to(device), 0.1)
            expected = dense(q, k[rows.cpu()], v[rows.cpu()], F.pad(visible, (0, 3)), 0.1)
            torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("attend", BACKENDS, indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_masked_equals_dense_attention(shape: Shape, attend: Attend) -> None:
    """Over several blocks of slots and over less than one; a query that sees no key gets 0."""
    (backend, device), (kv_heads, group, nodes, head_dim) = attend, shape
    dtype = torch.bfloat16 if backend.name == "flash" else torch.float32
    for slots in (9, 130):
        q, k, v, _ = (x.to(dtype) for x in make_cache([slots, slots], kv_heads, group, nodes, head_dim, 0))
        k, v = k[:, :, :slots], v[:, :, :slots]
        mask = some_mask(2, nodes, slots)
        mask[1, -1] = False
        got = backend.masked(*(x.to(device) for x in (q, k, v, mask)), 0.15)
        expected = dense(q, k, v, mask, 0.15)
        torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert got[1, :, -1].eq(0).all()
