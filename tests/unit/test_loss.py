"""The chunked losses, compared with formulas on whole logits: value and gradient in fp64."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_reference import plain_loss

from longspec.errors import UserError
from longspec.train.loss import DraftLoss
from longspec.train.losses import LOSSES, register_loss

B, T, HIDDEN, V = 3, 11, 8, 23


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, nn.Linear]:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, V, bias=False).to(dtype).requires_grad_(False)
    labels = torch.randint(0, V, (B, T))
    labels[0, :4] = labels[1, 7:] = labels[2, 5] = -100
    labels[:, 0] = -100
    hidden = torch.randn(B, T, HIDDEN, dtype=dtype, requires_grad=True)
    return hidden, torch.randn(B, T, HIDDEN, dtype=dtype), labels, head


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient_equal_the_full_logits_formula(loss: str, chunk: int) -> None:
    """Evaluation has the same sums. A label is a hit if the hidden state before it ranks it first."""
    hidden, teacher, labels, head = example()
    objective = DraftLoss(loss, chunk_logits=chunk * V)
    value, metrics = objective(hidden, teacher, labels, head)
    (gradient,) = torch.autograd.grad(value * 0.3, hidden)
    expected = plain_loss(loss, hidden, teacher, labels, head)
    (expected_gradient,) = torch.autograd.grad(expected * 0.3, hidden)
    torch.testing.assert_close((value, gradient), (expected, expected_gradient), rtol=1e-12, atol=1e-12)
    assert metrics["loss"] == value.detach() and not metrics["loss"].requires_grad
    assert metrics.keys() == {"loss", *["ce"] * (loss in ("ce", "mixed")), *["kl"] * (loss != "ce")}

    scores, hits = objective.scores(hidden, teacher, labels, head)
    assert scores == metrics
    guessed = head(hidden[:, :-1]).argmax(-1)
    assert hits.shape == labels.shape and not hits[:, 0].any()
    assert torch.equal(hits[:, 1:], guessed == labels[:, 1:])
    liked = labels.clone()
    liked[:, 1:] = torch.where(liked[:, 1:] == -100, -100, guessed)
    _, all_hits = objective.scores(hidden, teacher, liked, head)
    assert torch.equal(all_hits[:, 1:], labels[:, 1:] != -100)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(0, V, 3)])
@pytest.mark.parametrize("name", ["ce", "distill"])
@patch.dict(LOSSES)
def test_a_registered_loss_trains_as_the_built_in_one_of_its_formula(name: str, vocabulary: Tensor | None) -> None:
    """Value, gradient and scores, with and without a list of the draft's tokens."""

    def ce(logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        assert target_logits is None
        return F.cross_entropy(logits, labels, reduction="none")

    def distill(logits: Tensor, target_logits: Tensor | None, labels: Tensor) -> Tensor:
        assert target_logits is not None
        terms = F.kl_div(logits.log_softmax(-1), target_logits.log_softmax(-1), reduction="none", log_target=True)
        return terms.sum(-1)

    register_loss("own", {"ce": ce, "distill": distill}[name], reads_target=name == "distill")
    hidden, teacher, labels, head = example()
    results = []
    for loss in (name, "own"):
        objective = DraftLoss(loss, chunk_logits=4 * V, vocabulary=vocabulary)
        value, metrics = objective(hidden, teacher, labels, head)
        (gradient,) = torch.autograd.grad(value * 0.3, hidden)
        results.append((value, gradient, metrics, objective.scores(hidden, teacher, labels, head)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


@patch.dict(LOSSES)
def test_a_registered_loss_has_a_new_name_and_a_value_per_token() -> None:
    register_loss("own", lambda logits, target_logits, labels: logits.mean(), reads_target=False)
    for name in ("own", "ce"):
        with pytest.raises(UserError, match=f"there is a loss '{name}'"):
            register_loss(name, lambda logits, target_logits, labels: labels, reads_target=False)
    with pytest.raises(UserError, match="one value per token"):
        DraftLoss("own")(*example())


def test_a_micro_batch_without_labels_has_loss_zero_and_a_gradient() -> None:
    """A rank whose micro-batch is all prompt must still take part in backward."""
    hidden, teacher, labels, head = example()
    value, _ = DraftLoss("ce")(hidden, teacher, torch.full_like(labels, -100), head)
    value.backward()
    assert value == 0 and hidden.grad is not None and not hidden.grad.any()


@pytest.mark.parametrize("loss", LOSSES)
def test_bf16_hidden_states_are_scored_in_fp32(loss: str, device: str) -> None:
    """The result equals the formula on the same logits."""
    hidden, teacher, labels, head = example(torch.bfloat16)
    hidden, teacher, head = hidden.detach().to(device).requires_grad_(), teacher.to(device), head.to(device)
    value, _ = DraftLoss(loss, chunk_logits=5 * V)(hidden, teacher, labels, head)
    (gradient,) = torch.autograd.grad(value, hidden)
    assert value.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    wide = [x.detach().float().requires_grad_() for x in (head(hidden), head(teacher))]
    expected = plain_loss(loss, wide[0], wide[1], labels.to(device), nn.Identity())
    torch.testing.assert_close(value, expected)
    (expected_gradient,) = torch.autograd.grad(expected, wide[0])
    torch.testing.assert_close(gradient.float(), expected_gradient @ head.weight.float(), rtol=2e-2, atol=5e-3)


def test_never_more_than_a_chunk_of_logits() -> None:
    """The largest tensor over the vocabulary has the rows of one chunk, in forward and in backward."""
    rows: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == V and out.data_ptr() != weight:
                rows.append(out.shape[0])
            return out

    hidden, teacher, labels, head = example()
    weight = head.weight.data_ptr()
    with Watch():
        value, _ = DraftLoss("mixed", log_target_loss=True, chunk_logits=4 * V)(hidden, teacher, labels, head)
        value.backward()
    assert max(rows) == 4


LISTED = torch.tensor([0, 2, 3, 7, 11, 12, 19, 22])


def plain_listed(loss: str, hidden: Tensor, target_hidden: Tensor, labels: Tensor, rows: nn.Linear) -> Tensor:
    """`plain_loss` over the tokens of LISTED alone, by a head of their rows; labels outside count for all but `ce`."""
    number = torch.full((V,), -100)
    number[LISTED] = torch.arange(len(LISTED))
    listed_labels = torch.where(labels == -100, -100, number[labels.clamp(min=0)])
    ce = plain_loss("ce", hidden, target_hidden, listed_labels, rows)
    all_labels = torch.where(labels == -100, -100, 0)
    kl, accepted = (plain_loss(name, hidden, target_hidden, all_labels, rows) for name in ("distill", "acceptance"))
    return {"ce": ce, "distill": kl, "mixed": (ce + kl) / 2, "acceptance": accepted}[loss]


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_vocabulary_list_restricts_draft_and_target(loss: str, chunk: int) -> None:
    """Value and gradient are those of the formula on the list's logits. A label outside the list is a miss."""
    hidden, teacher, labels, head = example()
    objective = DraftLoss(loss, log_target_loss=True, chunk_logits=chunk * V, vocabulary=LISTED)
    value, metrics = objective(hidden, teacher, labels, head)
    (gradient,) = torch.autograd.grad(value, hidden)
    rows = nn.Linear(HIDDEN, len(LISTED), bias=False, dtype=head.weight.dtype).requires_grad_(False)
    rows.weight.copy_(head.weight[LISTED])
    expected = plain_listed(loss, hidden, teacher, labels, rows)
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close((value, gradient), (expected, expected_gradient), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(metrics["target_loss"], plain_loss("ce", teacher, teacher, labels, head))

    scores, hits = objective.scores(hidden, teacher, labels, head)
    assert scores == metrics
    guessed = LISTED[head(hidden[:, :-1])[..., LISTED].argmax(-1)]
    assert torch.equal(hits[:, 1:], guessed == labels[:, 1:])
    outside = ~torch.isin(labels, LISTED) & (labels != -100)
    assert outside.any() and not hits[outside].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_head_of_the_drafts_own_trains(loss: str) -> None:
    """Value and both gradients are those of the formula; the teacher has the target's head."""
    hidden, teacher, labels, head = example()
    own = nn.Linear(HIDDEN, len(LISTED), bias=False, dtype=head.weight.dtype)
    objective = DraftLoss(loss, chunk_logits=4 * V, vocabulary=LISTED)
    value, metrics = objective(hidden, teacher, labels, head, own)
    gradients = torch.autograd.grad(value * 0.3, (hidden, own.weight))
    # The teacher's states as the draft's own head would read them: the same logits by a solved linear system.
    rows = head.weight[LISTED]
    as_own = torch.linalg.lstsq(own.weight, rows @ teacher.flatten(0, 1).T).solution.T.view_as(teacher)
    assert torch.allclose(own(as_own), teacher @ rows.T) == (len(LISTED) <= HIDDEN)
    expected = plain_listed(loss, hidden, as_own, labels, own)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected * 0.3, (hidden, own.weight)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)
    scored, _ = objective.scores(hidden, teacher, labels, head, own)
    torch.testing.assert_close(scored["loss"], metrics["loss"])
