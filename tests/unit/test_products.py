"""Products of few tokens, elementwise kernels, compaction and loss kernels against their references."""

from itertools import product

import layer_reference as reference
import pytest
import torch
import torch.nn.functional as F
from kernel_devices import TOLERANCE, random
from layer_reference import check_rotation
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton")

from longspec.kernels.backend import Backend
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.shared.residual import HeadNorms
from longspec.kernels.torch import trees, vocabulary
from longspec.kernels.torch.vocabulary import OUTSIDE
from longspec.kernels.triton import skinny_product as skinny
from longspec.kernels.triton.compaction import compact
from longspec.kernels.triton.divergence import terms_and_gradient
from longspec.kernels.triton.elementwise import rms_norm, swiglu
from longspec.kernels.triton.layers import TritonStream, linear
from longspec.kernels.triton.logit_statistics import log_sum_exp
from longspec.kernels.triton.skinny_product import split_product


def skip_what_the_interpreter_cannot(dtype: torch.dtype, device: str, tokens: int = 2) -> None:
    if dtype == torch.bfloat16 and device == "cpu" and tokens > 1:
        pytest.skip("Triton's interpreter has no bf16 dot")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("tokens", "rows", "width"),
    [
        *((1, 10, 32), (1, 6, 2100), (1, 2, 1), (1, 4, 18944), (1, 10, 576), (1, 2, 100)),
        *((2, 70, 96), (16, 128, 256), (17, 330, 40), (64, 256, 32), (69, 330, 40)),
    ],
)
def test_linear_equals_torchs(tokens: int, rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """With a bias and without one, for sizes that are multiples of the blocks and others."""
    skip_what_the_interpreter_cannot(dtype, device, tokens)
    x = random(1, tokens, width).to(device, dtype)
    weight = (random(rows, width, seed=1) / width**0.5).to(device, dtype)
    for bias in (None, random(rows, seed=3).to(device, dtype)):
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        got = linear(x, weight, bias)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [256, 512])
def test_a_split_product_is_the_sum_of_its_parts(
    width: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_what_the_interpreter_cannot(dtype, device)
    monkeypatch.setattr(skinny, "describe_gpu", lambda device: describe_gpu(device)._replace(multiprocessors=132))
    x, weight = random(64, width).to(device, dtype), (random(96, width, seed=1) / width**0.5).to(device, dtype)
    parts = split_product(x, weight)
    assert parts.dtype == torch.float32 and len(parts) == (4 if width == 512 else 2)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(parts.sum(0).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "width"), [*((10, width) for width in (64, 100, 576, 1536, 2100)), (8, 18944)])
def test_a_token_is_normalized_in_its_product_or_before(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Rounded as transformers does; a program that reaches past the last row changes nothing."""
    x, norm = (3 * random(1, 1, width)).to(device, dtype), random(width, seed=1).to(device, dtype)
    weight = (random(rows, width, seed=2) / width**0.5).to(device, dtype)
    expected, stream = reference.rms_norm(x, norm, 1e-3).double() @ weight.double().t(), TritonStream(x, 1e-3)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(stream.project(norm, weight, None).double(), expected, **close)
    gated = reference.swiglu(*expected.chunk(2, -1)).double()
    torch.testing.assert_close(stream.project_gated(norm, weight).double(), gated, **close)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("batch", "nodes", "width", "inner"),
    [
        # One vector: shorter than the shortest one that a program takes at once, and longer.
        *((1, 1, width, inner) for width in (24, 72) for inner in (40, 100)),
        *((2, 3, 24, 40), (1, 17, 256, 128), (1, 64, 96, 512), (1, 69, 40, 2), (1, 17, 192, 66), (1, 69, 96, 70)),
        (2, 50, 24, 40),
    ],
)
def test_the_residual_stream_equals_plain_sums_for_any_number_of_tokens(
    batch: int, nodes: int, width: int, inner: int, dtype: torch.dtype, device: str
) -> None:
    """Two branches and a last one, which are added in different ways."""
    skip_what_the_interpreter_cannot(dtype, device, batch * nodes)
    hidden = random(batch, nodes, width).to(device, dtype)
    norm = random(width, seed=1).to(device, dtype)
    first = (random(inner, width, seed=2) / width**0.5).to(device, dtype)
    gate_up = (random(2 * inner, width, seed=3) / width**0.5).to(device, dtype)
    back = (random(width, inner, seed=4) / inner**0.5).to(device, dtype)
    x = hidden.double()
    for project in (
        lambda y: y @ first.double().t(),
        lambda y: reference.swiglu(*(y @ gate_up.double().t()).chunk(2, -1)),
    ):
        x = x + project(reference.rms_norm(x, norm.double(), 1e-5)) @ back.double().t()
    expected = x + x.new_ones(batch, nodes, inner) @ back.double().t()
    stream = TritonStream(hidden, 1e-5)
    stream.add_product(stream.project(norm, first, None), back)
    stream.add_product(stream.project_gated(norm, gate_up), back)
    close = {"rtol": 3 * TOLERANCE[dtype], "atol": 3 * TOLERANCE[dtype]}
    torch.testing.assert_close(stream.normed(norm).double(), reference.rms_norm(x, norm.double(), 1e-5), **close)
    stream.add_product(hidden.new_ones(batch, nodes, inner), back, last=True)
    torch.testing.assert_close(stream.hidden.double(), expected, **close)


ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
"""Error of two roundings."""


@pytest.mark.parametrize("dtype", list(ROUNDED))
@pytest.mark.parametrize("width", [1, 48, 1000])
def test_rms_norm_equals_transformers(width: int, dtype: torch.dtype, device: str) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).to(device, dtype)
    norm.weight.data = random(width, seed=1).to(device, dtype)
    x = (3 * random(2, 5, width)).to(device, dtype)
    expected = norm(x).detach()
    tolerance = ROUNDED[dtype]
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(rms_norm(x, norm.weight, 1e-5), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(ROUNDED))
@pytest.mark.parametrize("width", [3, 1024, 1500])
def test_swiglu_equals_its_reference(width: int, dtype: torch.dtype, device: str) -> None:
    """For the halves of one tensor, as a merged projection returns them, and for two tensors."""
    gate, up = random(2, 3, 2 * width).to(device, dtype).chunk(2, -1)
    expected = reference.swiglu(gate, up)
    for inputs in ((gate, up), (gate.contiguous(), up.contiguous())):
        torch.testing.assert_close(swiglu(*inputs), expected, rtol=ROUNDED[dtype], atol=ROUNDED[dtype])


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


OF_GRADIENTS = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Error of one rounding of the gradient; the interpreter rounds toward 0."""
ROWS = 7


def exact(logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Terms and gradient by torch in fp64."""
    gradient = logits.double().clone()
    wide_teacher = None if teacher is None else teacher.double()
    norm = gradient.logsumexp(-1)
    teacher_norm = None if wide_teacher is None else wide_teacher.logsumexp(-1)
    terms = vocabulary.terms_and_gradient(gradient, wide_teacher, labels, share, norm, teacher_norm)
    return terms, gradient


def logits_of(vocab: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Rows of logits that are sharp, flat, or far from zero."""
    random = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor([1.0, 5.0, 0.1, 3.0, 1.0, 8.0, 2.0])
    shift = torch.tensor([0.0, 0, 0, -40, 90, 0, -9])
    return (random * scale[:, None] + shift[:, None]).to(device, dtype)


@pytest.mark.parametrize("dtype", list(OF_GRADIENTS))
@pytest.mark.parametrize(
    ("vocab", "share", "teacher"),
    [*product([5], (0.0, 0.5, 1.0), [True]), (5, 0.0, False), (9001, 0.0, False), (9001, 0.5, True)],
)
def test_terms_and_gradient_equal_the_reference(
    vocab: int, share: float, teacher: bool, dtype: torch.dtype, device: str
) -> None:
    """Including labels in other parts of the vocabulary and outside the draft's."""
    logits = logits_of(vocab, dtype, device, seed=1)
    teacher_logits = logits_of(vocab, dtype, device, seed=2) if teacher else None
    labels = torch.tensor([0, vocab - 1, 3, -1, vocab, OUTSIDE, 2], device=device)
    expected, gradient = exact(logits, teacher_logits, labels, share)

    teacher_norm = None if teacher_logits is None else log_sum_exp(teacher_logits)
    terms = terms_and_gradient(logits, teacher_logits, labels, share, log_sum_exp(logits), teacher_norm)
    torch.testing.assert_close(terms.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=OF_GRADIENTS[dtype], atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_torchs_gradient_is_that_of_the_terms(share: float) -> None:
    """Labels in other parts of the vocabulary have no cross-entropy with the rows of this part."""
    logits = logits_of(9, torch.float64, "cpu", seed=1).requires_grad_()
    teacher = logits_of(9, torch.float64, "cpu", seed=2)
    labels = torch.tensor([0, 8, OUTSIDE, -1, 9, 7, 2])
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    onehot = (torch.arange(9) == labels[:, None]).double()
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    expected = torch.stack([-(onehot * log_q).sum(1), kl if share else 0 * kl, -(onehot * log_p).sum(1)], 1)
    # The normalizer's part of a cross-entropy belongs to all rows but OUTSIDE ones, whatever part has the label.
    normalized = (logits.logsumexp(1) * (labels != OUTSIDE)).sum() - (onehot * logits).sum()
    ((1 - share) * normalized + share * kl.sum()).backward()
    terms, gradient = exact(logits.detach(), teacher, labels, share)
    torch.testing.assert_close((terms, gradient), (expected.detach(), logits.grad))


@pytest.mark.parametrize("cut", [1, 4096, 4099])
def test_terms_of_parts_of_a_vocabulary_add_up(cut: int, device: str) -> None:
    """With the log-sum-exp of the whole vocabulary; a part may be a single token."""
    logits, teacher = (logits_of(4100, torch.float32, device, seed) for seed in (1, 2))
    labels = torch.tensor([0, 4099, 3, 4098, 7, 4096, 2], device=device)
    expected, gradient = exact(logits, teacher, labels, 0.5)

    norm, teacher_norm = log_sum_exp(logits), log_sum_exp(teacher)
    total = torch.zeros_like(expected)
    parts = []
    for first, last in ((0, cut), (cut, 4100)):
        part = logits[:, first:last].contiguous()
        teacher_part = teacher[:, first:last].contiguous()
        total += terms_and_gradient(part, teacher_part, labels - first, 0.5, norm, teacher_norm)
        parts.append(part)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.cat(parts, 1).double(), gradient, rtol=1e-5, atol=1e-6)


def test_tokens_impossible_for_both_add_nothing_and_a_broken_teacher_gives_nan(device: str) -> None:
    logits, teacher = (logits_of(9, torch.float32, device, seed) for seed in (1, 2))
    logits[:, 4] = teacher[:, 4] = -torch.inf
    teacher[2, 0] = torch.nan
    labels = torch.zeros(ROWS, dtype=torch.long, device=device)
    expected, gradient = exact(logits, teacher, labels, 1.0)

    terms = terms_and_gradient(logits, teacher, labels, 1.0, log_sum_exp(logits), log_sum_exp(teacher))
    assert terms[:, 1].isnan().tolist() == expected[:, 1].isnan().tolist() == [row == 2 for row in range(ROWS)]
    torch.testing.assert_close(terms, expected.float(), rtol=1e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(logits, gradient.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_no_tokens_have_no_terms(device: str) -> None:
    empty = torch.empty(0, 9, device=device)
    assert log_sum_exp(empty).shape == (0,)
    labels = torch.empty(0, dtype=torch.long, device=device)
    assert terms_and_gradient(empty, None, labels, 0.0, log_sum_exp(empty), None).shape == (0, 3)
