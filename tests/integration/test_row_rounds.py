"""Rounds of rows with settings of their own follow each row's distribution exactly, and planted faults do not pass."""

from typing import Any

import numpy as np
import pytest
import torch
from distributions import p_value
from pairs import make_pair
from samplers import sampler
from torch import Tensor

from longspec.inference.engine.batch import KINDS, Batch, Mode
from longspec.inference.engine.modes import SelectiveDrafter
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import Drafting
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.sampling import GREEDY_KIND, Sampler
from longspec.models import draft_vocabulary
from longspec.models.glide import GlideMixin

VOCAB = 4
PROMPT = [1, 3, 0, 2, 2]
SETTINGS = [  # (sampling, speculates)
    (Sampling(1.0), True),
    (Sampling(0.6), True),
    (Sampling(1.5, top_k=3), True),
    (Sampling(1.0, top_p=0.8), True),
    (Sampling(1.5, min_p=0.25), True),
    (Sampling(1.5, typical_p=0.8, epsilon_cutoff=0.1), True),
    (Sampling(1.0), False),
    (Sampling(0.7, top_p=0.9), False),
    (Sampling(0.0), True),
    (Sampling(0.0), False),
]
"""Rows that run next to each other."""
COPIES, REPEATS = 128, 6
METHODS = {
    "tree": Drafting("tree", (2, 3)),
    "tree, descend": Drafting("tree", (2, 3), tree_rule="descend"),
    "tree, budget": Drafting("tree", (2, 3), tree_nodes=7, lookup_branches=True),
    "seq": Drafting("seq", gamma=2),
}
LEVEL = 1e-3 / len(METHODS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen2", vocab_size=VOCAB)


def laws(model: GlideMixin) -> Tensor:
    """[settings, VOCAB^3]: the probability of each sequence of three tokens after the prompt."""
    tokens = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], 1)).logits
    logits = logits[:, len(PROMPT) - 1 : -1]
    rows = []
    for sampling, _ in SETTINGS:
        if sampling.temperature == 0:
            p = torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()
        else:
            own = {name: getattr(sampling, name) for name in FILTERS}
            p = sampler(sampling.temperature, len(logits), **own).probabilities(logits)
        rows.append(p.gather(2, tokens[..., None])[..., 0].double().prod(1))
    return torch.stack(rows)


@torch.no_grad()
def outcomes(model: GlideMixin, method: Drafting) -> Tensor:
    """Counts [settings, VOCAB^3] of the first three tokens, of COPIES * REPEATS answers per setting."""
    runner = make_runner(model, "sdpa", False)
    rows = len(SETTINGS) * COPIES
    batch = Batch(runner, method, rows, 256)
    prompt = torch.tensor([PROMPT])
    batch.active.fill_(True)
    counts = torch.zeros(len(SETTINGS), VOCAB**3)
    hidden = batch.read_prompts(slice(0, 1), [np.array(PROMPT)], 0)
    for row in range(rows):
        batch.copy_prefix(0, row, len(PROMPT))
    samplings, speculates = zip(*SETTINGS * COPIES, strict=True)
    batch.assign(range(rows), [len(PROMPT)] * rows, samplings, range(rows), speculates)
    batch.drafter.start(prompt.expand(rows, -1), torch.full((rows,), len(PROMPT)))
    for _ in range(REPEATS):
        batch.settings["seed"].add_(rows)
        batch.cache.lengths.fill_(len(PROMPT))
        first = Sampler(KINDS[-1], batch.settings)
        batch.root.copy_(first.after_prefill().choose(runner.logits(hidden)[:, 0].expand(rows, -1)))
        answers = [[token] for token in batch.root.tolist()]
        while min(map(len, answers)) < 3:
            result = batch.rounds(Mode(True, KINDS[-1]), rows)(batch.active)
            for answer, count, tokens in zip(answers, result.counts.tolist(), result.tokens.tolist(), strict=True):
                answer += tokens[:count]
        for row, (a, b, c, *_) in enumerate(answers):
            counts[row % len(SETTINGS), (a * VOCAB + b) * VOCAB + c] += 1
    return counts


@pytest.mark.parametrize("name", METHODS)
def test_every_row_follows_its_own_distribution(model: GlideMixin, name: str) -> None:
    assert p_value(outcomes(model, METHODS[name]), laws(model)) > LEVEL


def test_a_draft_with_a_vocabulary_follows_every_rows_distribution(model: GlideMixin) -> None:
    """The prompt has every token; the rows keep the newest one of the two outside the list."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MOST_EXTRA", "LEAST_EXTRA"):
            patch.setattr(draft_vocabulary, name, 1)
        model.draft_model.set_vocabulary(torch.tensor([1, 2]))
        try:
            assert p_value(outcomes(model, METHODS["tree"]), laws(model)) > LEVEL
        finally:
            model.draft_model.set_vocabulary(None)


def test_planted_faults_are_seen(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    law = laws(model)

    def keeps_children(self: Any, root: Tensor, cache: Any) -> Any:
        """Vanilla rows accept and reject drafts of another sampler's law."""
        proposal = self.drafter.propose(root, cache)
        proposal.sampled_from[~self.speculates] = 1 / VOCAB
        return proposal

    with monkeypatch.context() as patch:
        patch.setattr(SelectiveDrafter, "propose", keeps_children)
        assert p_value(outcomes(model, METHODS["tree"]), law) < 1e-6
    with monkeypatch.context() as patch:  # draft and target draw the same numbers
        patch.setattr(Sampler, "_stream", lambda self, kind, step: kind)
        patch.setattr(Sampler, "after_prefill", lambda self: self)
        assert p_value(outcomes(model, METHODS["seq"]), law) < 1e-6


def test_rounds_of_batches_of_other_sizes_warm_up_anew(model: GlideMixin) -> None:
    """Compaction of the whole cache may be another kernel, and must not be compiled during a capture."""
    runner = make_runner(model, "auto", True)
    kinds = set()
    for max_rows in (1, 5, 16):
        batch = Batch(runner, METHODS["tree"], max_rows, 256)
        kinds.add(batch.state(Mode(True, GREEDY_KIND), slice(0, 1)).kind)
    assert len(kinds) == 3
