"""The kernels between the matrix products, and compaction, against transformers' modules and plain torch."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from longspec.kernels.decoding import tree_reference
from longspec.kernels.decoding.compaction import compact
from longspec.kernels.shared.elementwise import gather_rows, rms_norm, rotate_and_store, rotate_queries, swiglu
from longspec.models.draft_layer import rotate

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}  # two roundings


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 48, 1000])
def test_rms_norm_equals_transformers(width: int, dtype: torch.dtype, device: str) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(device, dtype)
    norm.weight.data = random(width, seed=1).to(device, dtype)
    x = (3 * random(2, 5, width)).to(device, dtype)
    close = TOLERANCE[dtype]
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), norm(x).detach(), rtol=close, atol=close)


def test_gather_rows_is_indexing(device: str) -> None:
    table = random(7, 1500).to(device, torch.float16)
    index = torch.tensor([[6, 0, 3], [3, 1, 6]], device=device)[:, :2]
    assert torch.equal(gather_rows(table, index), table[index])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm_adds_the_parts_of_a_product_first(dtype: torch.dtype, device: str) -> None:
    x, weight = random(4, 48).to(device, dtype), random(48, seed=1).to(device, dtype)
    parts = random(2, 4, 48, seed=2).to(device)
    total = (x.float() + parts.sum(0)).to(dtype)
    expected = rms_norm(total, weight, 1e-6)
    got = rms_norm(x, weight, 1e-6, parts)
    torch.testing.assert_close(x, total, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(got, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [3, 1024, 1500])
def test_swiglu_equals_plain_torch(width: int, dtype: torch.dtype, device: str) -> None:
    """Of the halves of one tensor, as a merged projection has them, and of two tensors."""
    gate, up = random(2, 3, 2 * width).to(device, dtype).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype)
    for given in ((gate, up), (gate.contiguous(), up.contiguous())):
        torch.testing.assert_close(swiglu(*given), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 5, 40), (0, 3, 8), (8, 1, 128)])
def test_rotate_and_store_equals_rotation_and_index_put(
    q_heads: int, kv_heads: int, head_dim: int, device: str
) -> None:
    """A negative slot stores nothing, and no other slot of the cache changes."""
    batch, nodes, capacity = 2, 3, 11
    qkv = random(batch, nodes, (q_heads + 2 * kv_heads) * head_dim).to(device)
    positions = torch.tensor([[0, 4, 4], [8, 9, 2]], device=device)
    slots = torch.tensor([[0, 10, -1], [3, 1, 2]], device=device)
    angle = random(10, head_dim // 2).repeat(1, 2)
    rope = angle.cos().to(device), angle.sin().to(device)
    keys, values = random(2, batch, kv_heads, capacity, head_dim, seed=2).to(device)
    expected_keys, expected_values = keys.clone(), values.clone()
    q, k, v = (
        part.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for part in qkv.split([q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
    )
    table = rope[0][positions], rope[1][positions]
    for b, n in (slots >= 0).nonzero().tolist():
        expected_keys[b, :, slots[b, n]] = rotate(k, table)[b, :, n]
        expected_values[b, :, slots[b, n]] = v[b, :, n]
    got = rotate_and_store(qkv, positions, rope, keys, values, slots)
    torch.testing.assert_close(got, rotate(q, table))
    assert got.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(keys, expected_keys)
    torch.testing.assert_close(values, expected_values)
    if q_heads:
        torch.testing.assert_close(
            rotate_queries(qkv[..., : q_heads * head_dim].contiguous(), positions, rope, head_dim), rotate(q, table)
        )


def test_compaction_equals_its_reference_and_touches_nothing_else(device: str) -> None:
    """Overlapping moves, a row that keeps nothing, one that keeps all of its path, one that keeps its root."""
    keys, values = random(2, 3, 4, 2, 30, 24).to(device)
    lengths = torch.tensor([0, 7, 20, 3], dtype=torch.int32, device=device)
    path = torch.tensor([[0, 1, 3, 4], [0, 2, 5, 9], [0, 4, 5, 6], [0, 3, 0, 0]], device=device)
    counts = torch.tensor([0, 4, 3, 1], device=device)
    expected = keys.clone(), values.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for store, original in zip(expected, (keys, values), strict=True):
            for step in range(count):
                store[:, row, :, length + step] = original[:, row, :, length + path[row, step]]
    plain = keys.clone(), values.clone()
    tree_reference.compact(*plain, lengths, path, counts)
    compact(keys, values, lengths, path, counts)
    for got, also, want in zip((keys, values), plain, expected, strict=True):
        assert torch.equal(got, want) and torch.equal(also, want)
