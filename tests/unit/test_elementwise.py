"""The elementwise kernels and the compaction kernel against their references, and these against transformers."""

import layer_reference as reference
import pytest
import torch
from kernel_devices import random
from layer_reference import check_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from longspec.kernels.backend import Backend
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.torch import trees
from longspec.kernels.triton.compaction import compact
from longspec.kernels.triton.elementwise import embed, rms_norm, rotate_and_store, swiglu
from longspec.kernels.triton.layers import TritonStream
from longspec.models.draft_layer import rotate

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
"""Error of two roundings."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 48, 1000])
def test_rms_norm_equals_transformers(width: int, dtype: torch.dtype, device: str) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(device, dtype)
    norm.weight.data = random(width, seed=1).to(device, dtype)
    x = (3 * random(2, 5, width)).to(device, dtype)
    expected = norm(x).detach()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rms_norm_first_adds_the_parts_of_a_product_in_place(dtype: torch.dtype, device: str) -> None:
    x, weight = random(4, 48).to(device, dtype), random(48, seed=1).to(device, dtype)
    parts = random(2, 4, 48, seed=2).to(device)
    expected_x = x.clone()
    expected = reference.rms_norm(expected_x, weight, 1e-6, parts)
    got = rms_norm(x, weight, 1e-6, parts)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(x, expected_x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got, expected, rtol=2 * tolerance, atol=2 * tolerance)


def test_embed_is_indexing(device: str) -> None:
    table = random(7, 1500).to(device, torch.float16)
    index = torch.tensor([[6, 0, 3], [3, 1, 6]], device=device)[:, :2]
    assert torch.equal(embed(table, index), table[index])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [3, 1024, 1500])
def test_swiglu_equals_its_reference(width: int, dtype: torch.dtype, device: str) -> None:
    """For the halves of one tensor, as a merged projection returns them, and for two tensors."""
    gate, up = random(2, 3, 2 * width).to(device, dtype).chunk(2, -1)
    expected = reference.swiglu(gate, up)
    for inputs in ((gate, up), (gate.contiguous(), up.contiguous())):
        torch.testing.assert_close(swiglu(*inputs), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 5, 40), (0, 3, 8), (8, 1, 128)])
def test_rotate_and_store_equals_its_reference(q_heads: int, kv_heads: int, head_dim: int, device: str) -> None:
    for rows in (None, torch.tensor([3, 1], dtype=torch.int32, device=device)):
        check_rotation(Backend.stream, q_heads, kv_heads, head_dim, device, rows=rows)
        q = check_rotation(TritonStream, q_heads, kv_heads, head_dim, device, rows=rows)
        assert q.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 5, 40), (8, 1, 128)])
def test_heads_are_normalized_before_the_rotation(
    q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """As in Qwen3, with separate weights for queries and keys; values do not change."""
    heads, positions = random(1, 3, q_heads + 2 * kv_heads, head_dim).to(device, dtype), torch.tensor([[4, 0, 7]])
    positions = positions.to(device)
    angle = random(10, head_dim // 2).repeat(1, 2)
    rope = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    table = rope[0][positions], rope[1][positions]
    norms = [Qwen3RMSNorm(head_dim, eps=1e-2).to(device, dtype) for _ in range(2)]
    for number, norm in enumerate(norms):
        norm.weight.data = random(head_dim, seed=3 + number).to(device, dtype)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], 2)
    expected = [rotate(norm(x).detach().transpose(1, 2), table) for norm, x in zip(norms, (q, k), strict=True)]
    keys, values = torch.zeros(2, 1, kv_heads, 3, head_dim, dtype=dtype, device=device)
    weights = HeadNorms(norms[0].weight, norms[1].weight, 1e-2)
    slots = torch.arange(3, device=device)[None]
    got = rotate_and_store(heads.flatten(2), TokenSlots(positions, rope, keys, values, slots), weights)
    close = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
    torch.testing.assert_close([got, keys], expected, **close)
    assert torch.equal(values, v.transpose(1, 2))


def test_compaction_equals_its_reference_and_a_loop(device: str) -> None:
    """Overlapping moves; sequences that keep nothing, their whole path, and only their root. No other slot changes."""
    keys, values = random(2, 3, 4, 2, 30, 24).to(device)
    lengths = torch.tensor([0, 7, 20, 3], dtype=torch.int32, device=device)
    path = torch.tensor([[0, 1, 3, 4], [0, 2, 5, 9], [0, 4, 5, 6], [0, 3, 0, 0]], device=device)
    counts = torch.tensor([0, 4, 3, 1], device=device)

    expected_keys, expected_values = keys.clone(), values.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for step in range(count):
            source = length + path[row, step]
            expected_keys[:, row, :, length + step] = keys[:, row, :, source]
            expected_values[:, row, :, length + step] = values[:, row, :, source]

    for function in (trees.compact, compact):
        got_keys, got_values = keys.clone(), values.clone()
        function(got_keys, got_values, lengths, path, counts)
        assert torch.equal(got_keys, expected_keys) and torch.equal(got_values, expected_values)


def test_the_current_stream_includes_a_product_that_the_next_norm_adds() -> None:
    """Reading it changes neither the stream nor the parts."""
    hidden, parts = random(2, 3, 16), random(4, 6, 16, seed=1)
    stream = TritonStream(hidden.clone(), 1e-6)
    torch.testing.assert_close(stream.current(), hidden)
    stream.parts = parts
    torch.testing.assert_close(stream.current(), hidden + parts.sum(0).view(2, 3, 16))
    assert torch.equal(stream.hidden, hidden) and stream.parts is parts
