"""Teacher-forced acceptance compared with decoding, and the bound of a tree compared with a sum over paths."""

from pathlib import Path

import torch
from pairs import make_pair
from torch import Tensor

from longspec import generate
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.models.glide import GlideMixin
from longspec.pipeline.forced import forced_acceptance, path_probabilities

SHAPE = (8, 8, 8)


def decoded(model: GlideMixin, prompt: Tensor, length: int) -> tuple[int, int]:
    """Number of rounds and tokens of greedy decoding while a whole tree fits before `length`."""
    sampler, runner = GREEDY, Runner(model)
    engine = StaticBatch(
        runner, TreeDrafter(runner, 1, SHAPE, sampler, "descend"), sampler, prompt[None], [len(prompt)], 60
    )
    engine.prefill()
    read, counts = len(prompt), []
    while read + len(SHAPE) + 2 <= length:
        counts.append(int(engine.round(torch.ones(1, dtype=torch.bool))[1]))
        read += counts[-1]
    return len(counts), sum(counts)


@torch.no_grad()
def test_forced_rounds_on_greedy_text_are_those_of_decoding(tmp_path: Path) -> None:
    model, prompt = make_pair(tmp_path), torch.arange(3, 23)
    text = generate(model, prompt[None], method="vanilla", max_new_tokens=50, eos_token_id=()).sequences[0]
    figures = forced_acceptance(model, prompt.tolist(), text[len(prompt) :].tolist(), SHAPE)
    assert (figures["rounds"], figures["decoded_tokens"]) == decoded(model, prompt, len(text))
    assert figures["decoded_tokens"] > 1.05 * figures["rounds"], "some tokens are accepted"


@torch.no_grad()
def test_forced_lookup_proposes_what_followed_before(tmp_path: Path) -> None:
    """A text that repeats itself: each round accepts the whole chain."""
    model, period = make_pair(tmp_path), list(range(3, 23))
    figures = forced_acceptance(model, 2 * period, 2 * period, (1, 1, 1), "lookup")
    assert figures["decoded_tokens"] == 4 * figures["rounds"] and not figures["bound"]


def test_the_bound_sums_the_targets_probabilities_over_paths() -> None:
    """A root with children 5 and 7, a child 2 below 7, and a node without parent that only fills its level."""
    visible = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    proposal = Proposal(
        tokens=torch.tensor([[1, 5, 7, 2, 0]]),
        parents=torch.tensor([[-1, 0, 0, 2, -1]]),
        levels=torch.tensor([0, 1, 1, 2, 2]),
        visible=torch.tensor([visible]) > 0,
        depth=2,
    )
    logits = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0]
    expected = torch.stack([torch.tensor(1.0), p[0, 5], p[0, 7], p[0, 7] * p[2, 2], torch.tensor(0.0)])
    torch.testing.assert_close(path_probabilities(proposal, logits)[0], expected)
