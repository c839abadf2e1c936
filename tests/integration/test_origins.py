"""The origin of each token is that of the node that was accepted, where a tree has nodes of both kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair
from serving import answers, serving
from torch import Tensor

from longspec.inference.drafting.proposal import WrappedDrafter
from longspec.inference.engine.requests import Request
from longspec.inference.engine.round_record import RoundResult
from longspec.inference.engine.rounds import Rounds

PROMPT = [1, 5, 1, 4, 2, 5, 1, 5, 1, 4, 2, 3]


def path_origins(drafter: Any, path: list[int]) -> list[str]:
    """Of the accepted tokens of row 0: from lookup as far as they follow one of the branches."""
    while isinstance(drafter, WrappedDrafter):
        drafter = drafter.drafter
    state = drafter.lookup.state
    exists = state.scores[0] > -torch.inf
    branches = [tokens[inside].tolist() for tokens, inside in zip(state.tokens[0], exists, strict=True)]
    depths = range(1, len(path) + 1)
    return ["lookup" if any(branch[:d] == path[:d] for branch in branches) else "draft" for d in depths]


def test_tokens_and_trees_have_the_origin_of_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamers get the origins of these events."""
    expected: list[list[str]] = []
    play = Rounds.round

    def watched(self: Rounds, active: Tensor) -> RoundResult:
        played = play(self, active)
        path = played.tokens[0, : int(played.counts[0]) - 1].tolist()
        expected.append([*path_origins(self.drafter, path), "target"])
        return played

    monkeypatch.setattr(Rounds, "round", watched)
    # A pair that loops, with a vocabulary so small that a random draft is often right.
    model = make_pair(tmp_path, "qwen2", vocab_size=7)
    with serving(model, max_rows=1, method="tree", lookup_branches=True, tree_nodes=9) as scheduler:
        expected.clear()
        (answer,) = answers(scheduler, [Request(PROMPT, 60, trace=True)])
    assert answer.events[0].origins == ["target"]
    for event, origins in zip(answer.events[1:], expected, strict=True):
        assert event.origins == origins[: len(event.ids)]
        assert event.tree is not None and event.tree.origins == origins[:-1]
    assert {origin for event in answer.events for origin in event.origins} == {"draft", "lookup", "target"}
