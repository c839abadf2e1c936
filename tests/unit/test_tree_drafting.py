"""The drafted tree is the best one, compared with brute force over parents × vocabulary, and so are its parts."""

from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from oracles import prefilled
from pairs import make_pair, ragged_prompts
from penalty_reference import sampler

from longspec.inference.acceptance import accept
from longspec.inference.adaptive.plans import Plan
from longspec.inference.drafting.lookup import LookupBranches, TokenHistory
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.round_record import Report, RowRound
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin

SHAPE = (3, 5, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@torch.no_grad()
def test_tree_holds_the_drafts_most_probable_continuations(tmp_path: Path, temperature: float) -> None:
    """Each level is the top k over parents × vocabulary of the draft's own log-probabilities at that temperature."""
    model = make_pair(tmp_path)
    prompt = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    own = sampler(temperature, 1)
    drafter = TreeDrafter(Runner(model), 1, SHAPE, own.drafting(), "descend")
    levels: list[torch.Tensor] = []
    level = drafter.draft.level
    drafter.draft.level = lambda *args: levels.append(level(*args)) or levels[-1]  # type: ignore[method-assign]
    engine = prefilled(model, list(prompt), drafter, own)
    tree = drafter.propose(engine.root, engine.cache)
    score, above = {0: 0.0}, [0]
    for depth, (logits, width) in enumerate(zip(levels, SHAPE, strict=True), start=1):
        log_p = (logits[0] / (temperature or 1.0)).log_softmax(-1).tolist()
        rows = zip(above, log_p, strict=True)
        candidates = {(node, token): score[node] + p for node, row in rows for token, p in enumerate(row)}
        best = sorted(candidates, key=candidates.__getitem__, reverse=True)[:width]
        here = (tree.levels == depth).nonzero()[:, 0].tolist()
        chosen = {node: (tree.parents[0, node].item(), tree.tokens[0, node].item()) for node in here}
        assert set(chosen.values()) == set(best)
        score = {node: candidates[choice] for node, choice in chosen.items()}
        above = here


def drafted(model: GlideMixin, shape: tuple[int, ...], temperature: float, lookup: bool = False) -> TreeDrafter:
    runner = Runner(model)
    branches = LookupBranches(runner, TokenHistory(2, runner.device)) if lookup else None
    return TreeDrafter(runner, 2, shape, sampler(temperature, 2).drafting(), "reject", lookup=branches)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_a_cut_tree_is_that_of_a_shorter_shape(tmp_path: Path, temperature: float) -> None:
    """For the same noise, after the whole tree was grown, and without an effect on it."""
    model = make_pair(tmp_path)
    _, _, prompts = ragged_prompts(20, 7)

    def proposals(shape: tuple[int, ...], levels: int, repeats: int) -> list[Proposal]:
        drafter = drafted(model, shape, temperature)
        engine = prefilled(model, prompts, drafter, drafter.sampler)
        cut = drafter.cut(6, levels)
        return [deepcopy(part.propose(engine.root, engine.cache)) for part in (drafter, cut) * repeats]

    whole, cut, again, cut_again = proposals(SHAPE, 2, repeats=2)
    _, short = proposals(SHAPE[:2], 2, repeats=1)
    for mine, plain in ((cut, short), (cut_again, short), (again, whole)):
        for name in ("tokens", "parents", "levels", "visible", "sampled_from", "q_rows", "ranks"):
            torch.testing.assert_close(getattr(mine, name), getattr(plain, name), rtol=0, atol=0)
    assert cut.tokens.shape == (2, 6) and int(cut.levels.max()) == 2 < int(whole.levels.max())


@torch.no_grad()
def test_a_whole_tree_tells_what_its_parts_would_have_accepted(tmp_path: Path) -> None:
    """Compared with rounds of these parts at the same roots, next to lookup branches."""
    model = make_pair(tmp_path, vocab_size=7)
    first, second = torch.randint(0, 7, (2, 30), generator=torch.Generator().manual_seed(3))
    drafter = drafted(model, SHAPE, 0.0, lookup=True)
    engine = prefilled(model, [first, second[:17]], drafter, drafter.sampler, new_tokens=300)
    engine.report = Report(ranks=True)
    plans = [Plan("tree", nodes, levels) for levels in (1, 2, 3) for nodes in (3, 5, 8)]
    seen = Counter[int]()
    for _ in range(40):
        counts = {}
        for plan in plans:
            proposal = drafter.cut(plan.nodes, plan.levels).propose(engine.root, engine.cache)
            logits = engine.runner.logits(engine.forward_tree(proposal, engine.cache))
            counts[plan] = accept(proposal, logits, drafter.sampler).count
        result = engine.round(torch.ones(2, dtype=torch.bool))
        for row, (count, line) in enumerate(zip(result.counts.tolist(), result.lines.tolist(), strict=True)):
            part = RowRound.read(line, drafter.depth + 1, engine.report)
            for plan in plans:
                accepted = len(part.accepted_by(plan))
                assert accepted == counts[plan][row], plan
                seen[count - 1 - accepted] += 1
    assert len(seen) > 3
