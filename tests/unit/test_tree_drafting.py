"""The drafted tree is the best one: compared with brute force over parents × vocabulary."""

from pathlib import Path

import pytest
import torch
from pairs import make_pair

from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine import Engine
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler

SHAPE = (3, 5, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@torch.no_grad()
def test_tree_holds_the_drafts_most_probable_continuations(tmp_path: Path, temperature: float) -> None:
    """Each level is the top k over parents × vocabulary of the draft's own log-probabilities at that temperature."""
    model = make_pair(tmp_path)
    prompt = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    sampler = Sampler(temperature, 0, 1.0)
    drafter = TreeDrafter(Runner(model), 1, SHAPE, sampler, "descend")
    levels: list[torch.Tensor] = []
    level = drafter.draft.level
    drafter.draft.level = lambda *args: levels.append(level(*args)) or levels[-1]  # type: ignore[method-assign]
    engine = Engine(Runner(model), drafter, sampler, prompt, [20], max_new_tokens=8)
    engine.prefill()
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
