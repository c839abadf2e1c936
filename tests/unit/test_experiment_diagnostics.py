"""Teacher-forced acceptance and the bound of a tree: against decoding itself, and against a sum over paths."""

from pathlib import Path

import torch
from pairs import make_pair

from experiments.diagnostics import depth_probabilities, forced_acceptance
from longspec import generate
from longspec.inference.drafting.proposal import Proposal

SHAPE = (2, 3, 2)


def test_forced_rounds_on_greedy_text_are_those_of_decoding(tmp_path: Path) -> None:
    """Rows of a batch, each with a prompt of its own length."""
    model = make_pair(tmp_path)
    prompts = [torch.arange(3, 23), torch.arange(5, 14)]
    outputs = [generate(model, p[None], max_new_tokens=40, tree_shape=SHAPE, eos_token_id=()) for p in prompts]
    figures = forced_acceptance(model, [output.sequences[0] for output in outputs], [20, 9], SHAPE)
    # Forced rounds end before the text does, so each row lacks the last ones of decoding.
    missing = sum(output.stats.rounds for output in outputs) - figures["rounds"]
    assert 0 <= missing <= 2 * (len(SHAPE) + 1)
    assert figures["rounds"] < figures["tokens"] <= 80 and figures["tokens"] >= 80 - 2 * (2 * len(SHAPE) + 2)
    assert figures["rounds"] < figures["bound"] < figures["rounds"] * (len(SHAPE) + 1)


def test_the_bound_sums_the_targets_probabilities_over_paths() -> None:
    """A root with children 5 and 7, a child 2 of the second, and a node without a parent that only fills its level."""
    visible = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    proposal = Proposal(
        tokens=torch.tensor([[1, 5, 7, 2, 0]]),
        parents=torch.tensor([[-1, 0, 0, 2, -1]]),
        levels=torch.tensor([0, 1, 1, 2, 2]),
        visible=torch.tensor([visible]) > 0,
        shape=(2, 2),
    )
    logits = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0]
    expected = torch.stack([p[0, 5] + p[0, 7], p[0, 7] * p[2, 2]])
    torch.testing.assert_close(depth_probabilities(proposal, logits)[0], expected)
