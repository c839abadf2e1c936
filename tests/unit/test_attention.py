"""The decode entry points against one dense fp64 attention: torch path on CPU, Triton path on the GPU."""

import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.kernels.attention import (
    hybrid_attention,
    masked_attention,
    prefill_attention,
    prefix_only_attention,
    resolve_attention,
)
from longspec.kernels.reference import attention_with_lse

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(2, 1, 1, 64), (2, 4, 69, 64), (1, 5, 5, 128), (1, 8, 40, 80)]


def make_cache(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, new: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, lengths; slots past lengths[b] + new are NaN."""
    generator = torch.Generator().manual_seed(nodes)
    slots = max(lengths) + new + 11
    q = torch.randn(len(lengths), kv_heads * group, nodes, head_dim, generator=generator)
    k, v = torch.randn(2, len(lengths), kv_heads, slots, head_dim, generator=generator)
    for row, length in enumerate(lengths):
        k[row, :, length + new :] = torch.nan
        v[row, :, length + new :] = torch.nan
    return q, k, v, torch.tensor(lengths)


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    return attention_with_lse(q.double(), k.double(), v.double(), visible, scale)[0]


def hybrid_mask(lengths: Tensor, tree_mask: Tensor, slots: int) -> Tensor:
    visible = (torch.arange(slots) < lengths[:, None, None]).repeat(1, tree_mask.shape[1], 1)
    for row, length in enumerate(lengths.tolist()):
        visible[row, :, length : length + tree_mask.shape[1]] = tree_mask[row]
    return visible


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths", [[150], [90, 90], [0, 130, 7]])
@pytest.mark.parametrize(("kv_heads", "group", "nodes", "head_dim"), SHAPES)
def test_hybrid_equals_dense_attention(
    kv_heads: int, group: int, nodes: int, head_dim: int, lengths: list[int], dtype: torch.dtype, device: str
) -> None:
    q, k, v, n = make_cache(lengths, kv_heads, group, nodes, head_dim, nodes)
    tree_mask = torch.rand(len(lengths), nodes, nodes, generator=torch.Generator().manual_seed(1)) < 0.5
    tree_mask[:, 0] = False
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    expected = dense(q, k, v, hybrid_mask(n, tree_mask, k.shape[2]), 0.15)
    inputs = (x.to(device) for x in (q, k, v, n, tree_mask))
    got = hybrid_attention(*inputs, 0.15, max(lengths) + 5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[150], [0, 0], [0, 130, 7]])
@pytest.mark.parametrize(("kv_heads", "group", "nodes", "head_dim"), SHAPES)
def test_prefix_only_equals_dense_attention(
    kv_heads: int, group: int, nodes: int, head_dim: int, lengths: list[int], device: str
) -> None:
    q, k, v, n = make_cache(lengths, kv_heads, group, nodes, head_dim, 0)
    visible = (torch.arange(k.shape[2]) < n[:, None, None]).expand(-1, nodes, -1)
    expected = dense(q, k, v, visible, 0.15)
    got = prefix_only_attention(*(x.to(device) for x in (q, k, v, n)), 0.15, max(lengths) + 3)
    torch.testing.assert_close(got.cpu().double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("nodes", "slots"), [(1, 1), (37, 37), (40, 100), (5, 100)])
def test_prefill_chunk_is_causal_up_to_its_end(nodes: int, slots: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, nodes, 64, generator=generator)
    k, v = torch.randn(2, 2, 2, slots, 64, generator=generator)
    visible = torch.ones(2, nodes, slots, dtype=torch.bool).tril(slots - nodes)
    got = prefill_attention(q.to(device), k.to(device), v.to(device), 0.1)
    torch.testing.assert_close(got.cpu().double(), dense(q, k, v, visible, 0.1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes", [3, 69])
def test_masked_attention_gives_zero_and_a_clean_gradient_where_nothing_is_visible(nodes: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, nodes, 64, generator=generator)
    k, v = torch.randn(2, 2, 2, 50, 64, generator=generator)
    mask = torch.rand(2, nodes, 50, generator=generator) < 0.5
    mask[0, 1] = False
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    got = masked_attention(*leaves, mask.to(device), 0.1)
    torch.testing.assert_close(got.detach().cpu().double(), dense(q, k, v, mask, 0.1), atol=1e-5, rtol=1e-5)
    assert got[0, :, 1].eq(0).all()
    got.square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)


def test_reference_gradient_is_clean_where_nothing_is_visible() -> None:
    q = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    mask[0, 1] = False
    out, lse = attention_with_lse(q, q[:, :1], q[:, :1], mask, 1.0)
    (out.sum() + lse[:, :, ::2].sum()).backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_hybrid_over_a_long_prefix_on_the_gpu(dtype: torch.dtype) -> None:
    """32k slots, 69 nodes, 32 heads over 8, a ragged batch; rows one by one against dense fp32 arithmetic."""
    lengths, nodes = torch.tensor([32768, 20011], device="cuda"), 69
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 32, nodes, 128, generator=generator, device="cuda").to(dtype)
    k, v = torch.randn(2, 2, 8, 33000, 128, generator=generator, device="cuda").to(dtype)
    tree_mask = torch.ones(2, nodes, nodes, dtype=torch.bool, device="cuda").tril()
    got = hybrid_attention(q, k, v, lengths, tree_mask, 128**-0.5, 32768)
    for row, length in enumerate(lengths.tolist()):
        used = slice(0, length + nodes)
        visible = torch.nn.functional.pad(tree_mask[row, None], (length, 0), value=True)
        one = (x[row, None].float() for x in (q, k[:, :, used], v[:, :, used]))
        expected = attention_with_lse(*one, visible, 128**-0.5)[0]
        torch.testing.assert_close(got[row, None].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
def test_decoding_attention_never_waits_for_the_device() -> None:
    q, k, v, lengths = (x.cuda() for x in make_cache([90, 30], 2, 4, 5, 64, 5))
    tree_mask = torch.ones(2, 5, 5, dtype=torch.bool, device="cuda").tril()

    def run() -> None:
        hybrid_attention(q, k, v, lengths, tree_mask, 0.1, 90)
        prefix_only_attention(q, k, v, lengths, 0.1, 90)
        prefill_attention(q, k, v, 0.1)
        masked_attention(q, k, v, torch.ones(2, 5, k.shape[2], dtype=torch.bool, device="cuda"), 0.1)

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_flash_attention_falls_back_to_sdpa_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = [resolve_attention("flash_attention_2") for _ in range(3)]
    assert names == ["sdpa"] * 3
    assert len(caplog.records) == 1 and "flash_attention_2" in caplog.text and "sdpa" in caplog.text


def test_other_attention_names_pass_and_unknown_ones_are_named() -> None:
    assert [resolve_attention(name) for name in (None, "sdpa", "eager")] == ["sdpa", "sdpa", "eager"]
    with pytest.raises(UserError, match="flash_atention"):
        resolve_attention("flash_atention")


def test_cpu_decoding_needs_no_triton() -> None:
    program = """
        import sys
        sys.modules["triton"] = None  # importing it now fails
        import torch
        from longspec.kernels.attention import hybrid_attention
        from longspec.kernels.varlen import varlen_attention
        x = torch.ones(1, 1, 2, 16)
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        print(hybrid_attention(x[:, :, :1], x, x, torch.tensor([1]), mask, 1.0, 1).sum().item())
    """
    run = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "16.0"
