"""The origin of each token is that of the node that was accepted, in all modes of `generate` and in the server."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from pairs import make_pair
from serving import answers, serving
from torch import Tensor

from longspec import generate
from longspec.inference.adaptive import time_cache
from longspec.inference.adaptive.controller import Controller
from longspec.inference.drafting.proposal import WrappedDrafter
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.requests import Request
from longspec.inference.engine.round_record import RoundResult
from longspec.inference.engine.rounds import Rounds
from longspec.models.glide import GlideMixin

PROMPT = [1, 5, 1, 4, 2, 5, 1, 5, 1, 4, 2, 3]
MODES: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "lookup": {"method": "lookup"},
    "seq": {"method": "seq"},
    "magicdec": {"method": "magicdec"},
    "tree": {"method": "tree"},
    "branches": {"method": "tree", "lookup_branches": True, "tree_nodes": 9},
    "auto": {"method": "auto"},
}
OF_PROPOSALS = {"seq": {"draft"}, "magicdec": {"draft"}, "tree": {"draft"}, "lookup": {"lookup"}, "vanilla": set()}
"""The other modes verify nodes of both kinds."""


class Listener:
    """A streamer that keeps the origins."""

    def __init__(self) -> None:
        self.origins: list[str] = []

    def put(self, value: Tensor) -> None: ...

    def put_from(self, value: Tensor, origin: str) -> None:
        self.origins.append(origin)

    def end(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    """A pair that loops, with a vocabulary so small that a random draft is often right."""
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen2", vocab_size=7)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The origins of each round's tokens in row 0, by a comparison of its path with the lookup branches."""
    expected: list[list[str]] = []
    play = Rounds.round

    def watched(self: Rounds, active: Tensor) -> RoundResult:
        played = play(self, active)
        if bool(active[0]):
            accepted = int(played.counts[0]) - 1
            expected.append([*path_origins(self.drafter, played.tokens[0, :accepted].tolist()), "target"])
        return played

    monkeypatch.setattr(time_cache, "REPLAYS", 1)
    monkeypatch.setattr(Rounds, "round", watched)
    turns = cycle([-1, -1, -1, 0, -2, 1])  # the largest tree before the other plans of "auto"
    monkeypatch.setattr(Controller, "choose", lambda self: self.impose(self.plans[next(turns)]))
    yield expected


def path_origins(drafter: Any, path: Sequence[int]) -> list[str]:
    """Of the accepted tokens of row 0: from lookup as far as they follow one of the branches."""
    while isinstance(drafter, WrappedDrafter):
        drafter = drafter.drafter
    if not isinstance(drafter, TreeDrafter):
        return ["lookup" if type(drafter).__name__ == "LookupDrafter" else "draft"] * len(path)
    branches: list[list[int]] = []
    if drafter.lookup is not None:
        state = drafter.lookup.state
        exists = state.scores[0] > -torch.inf
        branches = [tokens[inside].tolist() for tokens, inside in zip(state.tokens[0], exists, strict=True)]
    return [
        "lookup" if any(branch[:depth] == list(path[:depth]) for branch in branches) else "draft"
        for depth in range(1, len(path) + 1)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_streamed_tokens_have_the_origin_of_their_nodes(model: GlideMixin, mode: str, rounds: list[list[str]]) -> None:
    listener = Listener()
    settings = {"tree_shape": (3, 4, 4), "gamma": 3, "max_new_tokens": 60} | MODES[mode]
    out = generate(model, torch.tensor([PROMPT]), streamer=listener, **settings)
    played = rounds[-out.stats.rounds :]  # before them, "auto" measures
    assert listener.origins == ["target", *(origin for each in played for origin in each)][:60]
    assert set(listener.origins) - {"target"} == OF_PROPOSALS.get(mode, {"draft", "lookup"})


def test_served_tokens_and_trees_have_the_origin_of_their_nodes(model: GlideMixin, rounds: list[list[str]]) -> None:
    with serving(model, max_rows=1, **MODES["branches"]) as scheduler:
        rounds.clear()
        (answer,) = answers(scheduler, [Request(PROMPT, 60, trace=True)])
    assert answer.events[0].origins == ["target"]
    for event, origins in zip(answer.events[1:], rounds, strict=True):
        assert event.origins == origins[: len(event.ids)]
        assert event.tree is not None and event.tree.origins == origins[:-1]
