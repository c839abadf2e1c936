"""Parts of a prefix that attention to a tree merges, in Triton's interpreter and on the GPU, and captured calls.

`test_attention` compares prefix and tree with dense attention.
"""

import pytest
import torch
from kernel_devices import TOLERANCE
from test_attention import FLASH, some_mask
from torch import Tensor

pytest.importorskip("triton")

import attention_reference

from longspec.kernels.choice import choose_backend
from longspec.kernels.shared.attention import PrefixParts
from longspec.kernels.triton.tree_attention import prefix_and_tree_attention

pytestmark = pytest.mark.kernel

BLOCK = 48


def make_case(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, parts: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """q, k, v, lengths, mask, outputs and LSEs of the parts.

    All strides differ. Slots that the kernel must not read hold NaN, and so does every third part, which is empty.
    """
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
def test_a_captured_call_follows_lengths_masks_and_keys(
    backend: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
