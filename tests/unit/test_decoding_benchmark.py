"""The benchmark of decoding on tiny shapes: parts of a round, other implementations, acceptance files and tables."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import parts
from benchmarks.acceptance import key, read_acceptance
from benchmarks.decoding import filled_batch
from benchmarks.parts import parts_of_round
from benchmarks.read_bandwidth import LAUNCHES, read_sums
from benchmarks.shapes import random_pair
from longspec.inference.engine.rounds import Rounds
from longspec.inference.methods import DEFAULT_SHAPE
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin

SHAPE = [2, 3]
COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "results" / "smollm2-135m" / "summary.json"
OPTIONS = {"temperature": 0.0, "tree_shape": SHAPE, "gamma": 4, "tree_nodes": None, "lookup_branches": False}


@pytest.fixture(scope="module")
def pair() -> GlideMixin:
    return random_pair("tiny", "cpu", torch.float32)


def filled(pair: GlideMixin, method: str, **changes: Any) -> Rounds:
    batch, mode = filled_batch(Runner(pair), [20], method, Namespace(**OPTIONS | changes))
    return batch.state(mode, slice(0, 1))


@pytest.mark.parametrize(("block", "steps", "warps"), [*LAUNCHES, (64, 3, 1)])
def test_the_read_kernel_reads_every_number_once(block: int, steps: int, warps: int, device: str) -> None:
    x = torch.randint(-8, 8, (2 * 3 * block * steps,), generator=torch.Generator().manual_seed(0))
    x = x.to(device, torch.float16)
    assert torch.equal(read_sums(x, block, steps, warps), x.float().view(-1, block * steps).sum(1))


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [({}, 6), ({"tree_nodes": 4}, 4), ({"tree_nodes": 4, "lookup_branches": True}, 4)],
)
def test_the_parts_of_a_round_add_up_to_it_with_a_negative_residual(
    pair: GlideMixin, changes: dict[str, Any], nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that take 5 ms alone do not fit into a round of 9 ms. Only "accept + compact" changes the cache."""
    lengths: list[int] = []

    def timed(work: Callable[[], object]) -> float:
        work()
        lengths.append(int(engine.cache.lengths))
        return 5.0

    monkeypatch.setattr(parts, "captured_ms", timed)
    engine = filled(pair, "tree", **changes)
    assert engine.drafter.nodes == nodes
    with torch.no_grad():
        found = parts_of_round(engine, 9.0)
    assert sum(found.values()) == pytest.approx(9.0)
    assert found["accept + compact"] == 5.0 and found["residual"] == -6.0
    assert set(lengths[:-1]) == {20} and lengths[-1] > 20


def test_the_committed_experiment_has_the_figures_of_the_documented_trees() -> None:
    lengths = read_acceptance(COMMITTED)
    whole, part = OPTIONS | {"tree_shape": DEFAULT_SHAPE}, OPTIONS | {"tree_shape": DEFAULT_SHAPE, "tree_nodes": 32}
    assert 1 < lengths[key("tree", whole | {"temperature": 1.0})] < lengths[key("tree", whole)] < 6
    assert 1 < lengths[key("tree", part)] < lengths[key("tree", whole)]
