"""The error of verification attention relative to fp64: on torch, in Triton's interpreter and on the GPU."""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from kernel_devices import INTERPRETED
from torch import Tensor

from longspec.kernels.choice import choose_backend
from longspec.kernels.torch.attention import DecodingAttention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HUGE = 1e4
LOGITS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "plain": lambda prefix, tree: None,
    "equal": lambda prefix, tree: None,
    "huge of either sign": lambda prefix, tree: (prefix[::3].fill_(HUGE), prefix[1::3].fill_(-HUGE), tree.fill_(HUGE)),
    "dominant first slot": lambda prefix, tree: prefix[:1].fill_(HUGE),
    "dominant last slot": lambda prefix, tree: prefix[-1:].fill_(HUGE),
    "dominant root": lambda prefix, tree: tree[0].fill_(HUGE),
    "prefix far below tree": lambda prefix, tree: prefix.fill_(-HUGE),
    "tree far below prefix": lambda prefix, tree: tree.fill_(-HUGE),
}
"""Changes of the offsets, 0 elsewhere, that are added to the scores of the slots of prefix and tree."""
U32 = 2.0**-24
"""Unit roundoff of fp32, in which all backends accumulate."""

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def make_case(
    logits: str, lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, device: str
) -> Case:
    """q, k, v, lengths, tree_mask, scale. Slots past lengths[b] + nodes are NaN. Dimension 0 produces the offsets."""
    generator = torch.Generator().manual_seed(nodes)
    on_device = torch.Generator(device).manual_seed(nodes)
    scale, batch = head_dim**-0.5, len(lengths)
    q = torch.randn(batch, kv_heads * group, nodes, head_dim, generator=on_device, device=device)
    k, v = torch.randn(2, batch, kv_heads, max(lengths) + nodes + 11, head_dim, generator=on_device, device=device)
    q[..., 0] = (HUGE / scale) ** 0.5
    if logits == "equal":
        q.zero_()
    for row, length in enumerate(lengths):
        used = length + nodes
        offsets = torch.zeros(used)
        LOGITS[logits](*offsets.split([length, nodes]))
        k[row, :, :used, 0] = offsets.to(device) / (HUGE * scale) ** 0.5
        k[row, :, used:] = v[row, :, used:] = torch.nan
    tree_mask = torch.rand(batch, nodes, nodes, generator=generator) < 0.3
    tree_mask = tree_mask.tril() | torch.eye(nodes, dtype=torch.bool)
    tree_mask[:, :, 0] = True
    return q, k, v, torch.tensor(lengths, device=device), tree_mask.to(device), scale


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output in fp64 and the score magnitude sum_j p_j (1 - p_j) |s_j| of each query, one KV head at a time."""
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(batch, kv_heads, heads // kv_heads, nodes, head_dim, dtype=torch.float64, device=q.device)
    magnitude = out.new_empty(out.shape[:-1])
    for row, length in enumerate(lengths.tolist()):
        visible = torch.nn.functional.pad(tree_mask[row], (length, 0), value=True)
        for head in range(kv_heads):
            keys, values = (x[row, head, : length + nodes].double() for x in (k, v))
            scores = q[row].unflatten(0, (kv_heads, -1))[head].double() @ keys.T * scale
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            out[row, head] = weights @ values
            magnitude[row, head] = (weights * (1 - weights) * scores.abs()).sum(-1)
    return out.view(q.shape), magnitude.view(q.shape[:-1])


def check(attend: Attention, case: Case, dtype: torch.dtype) -> None:
    """The error of each query, relative to the norm of its exact output, is within the bound.

    The softmax weights and the output are rounded to the dtype once each, 2 u = eps with its unit roundoff u. The rest
    is fp32 with roundings of random sign. A score s is the sum of head_dim products: its error ds is about
    sqrt(head_dim / 3) U32 |s|; three times that is allowed. It moves the output by sum_j p_j ds_j (v_j - out), where
    |v_j - out| <= (1 - p_j) 2 max|v|. The sum over the keys adds sqrt(keys) U32, and exp2 of the hardware two ulp, 4
    U32.
    """
    q, k, v, lengths, tree_mask, scale = case
    q, k, v = (x.to(dtype) for x in (q, k, v))
    expected, magnitude = exact(q, k, v, lengths, tree_mask, scale)
    got = attend(lengths, tree_mask)(q, k, v, scale)
    assert got.dtype == dtype and got.isfinite().all()
    keys = (lengths + q.shape[2]).view(-1, 1, 1)
    bound = torch.finfo(dtype).eps + U32 * (6 * (q.shape[3] / 3) ** 0.5 * magnitude + keys**0.5 + 4)
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    worst = (error / bound).max().item()
    assert worst <= 1, f"{worst:.2f} times the bound; errors per row {error.amax((1, 2)).tolist()}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", LOGITS)
def test_torch_attention_is_as_exact_as_its_dtype(logits: str, dtype: torch.dtype) -> None:
    for lengths in ([0, 1, 64, 500], [2048]):
        check(DecodingAttention().hybrid, make_case(logits, lengths, 1, 4, 69, 64, "cpu"), dtype)


@INTERPRETED
@pytest.mark.parametrize(
    ("dtype", "logits", "splits", "lengths", "group", "nodes", "head_dim"),
    [
        # Not in bf16, whose bit patterns the interpreter's tl.dot multiplies.
        *((torch.float32, logits, 3, [0, 130], 1, 33, 64) for logits in LOGITS),
        *((torch.float16, logits, 2, [0, 1, 65], 4, 1, 128) for logits in LOGITS),
        (torch.float32, "plain", 1, [2048], 4, 1, 128),
    ],
)
def test_interpreted_kernels_are_as_exact_as_their_dtype(
    dtype: torch.dtype,
    logits: str,
    splits: int,
    lengths: list[int],
    group: int,
    nodes: int,
    head_dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels in the order in which CUDA runs them, with the number of splits fixed."""
    pytest.importorskip("triton")
    from longspec.kernels.triton import attention as triton_attention

    monkeypatch.setattr(triton_attention, "count_splits", lambda *shape: splits)
    check(
        triton_attention.TritonAttention().hybrid, make_case(logits, lengths, 1, group, nodes, head_dim, "cpu"), dtype
    )


NEEDS_FLASH = pytest.mark.skipif(not importlib.util.find_spec("fa3_fwd_interface"), reason="needs fa3-fwd")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", pytest.param("flash", marks=NEEDS_FLASH)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("nodes", [1, 69])
@pytest.mark.parametrize("length", [0, 1, 4096, 32768, 131072])
def test_gpu_attention_is_as_exact_as_its_dtype(
    length: int, nodes: int, logits: str, dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspec.kernels.triton import flash_attention

    if backend == "flash" and dtype != torch.bfloat16:
        pytest.skip("not for this dtype")
    monkeypatch.setattr(flash_attention, "FLASH_FROM", (0, 0, 0))
    attend = choose_backend(backend, torch.device("cuda"), dtype, 128).attention
    check(attend.hybrid, make_case(logits, [length], 8, 4, nodes, 128, "cuda"), dtype)
