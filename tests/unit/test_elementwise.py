"""The elementwise kernels and the compaction kernel against their references, and these against transformers."""

from itertools import product

import layer_reference as reference
import pytest
import torch
from kernel_devices import random
from layer_reference import check_rotation
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from longspec.kernels.backend import Backend
from longspec.kernels.shared.residual import HeadNorms
from longspec.kernels.torch import trees
from longspec.kernels.triton.compaction import compact
from longspec.kernels.triton.elementwise import embed, rms_norm, swiglu
from longspec.kernels.triton.layers import TritonStream

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
    """With and without Qwen3's norms of queries and keys."""
    norms = HeadNorms(*random(2, head_dim, seed=4).to(device), 1e-2)
    rows = torch.tensor([3, 1], dtype=torch.int32, device=device)
    for own_norms, own_rows in product((None, norms), (None, rows)):
        check_rotation(Backend.stream, q_heads, kv_heads, head_dim, device, own_norms, own_rows)
        q = check_rotation(TritonStream, q_heads, kv_heads, head_dim, device, own_norms, own_rows)
        assert q.transpose(1, 2).is_contiguous()


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
