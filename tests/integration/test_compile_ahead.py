"""Compilation ahead of the first round: a round in which no kernel runs uses valid indices and changes nothing."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair

pytest.importorskip("triton")
from kernel_devices import INTERPRETED
from triton.runtime.interpreter import GridExecutor

from longspec.inference.engine.batch import Batch
from longspec.inference.engine.capture import compile_ahead
from longspec.inference.engine.rounds import KINDS, Mode
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import METHODS, Drafting
from longspec.kernels.triton import compile_ahead as module
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.backend import TritonBackend


@INTERPRETED
@pytest.mark.parametrize(
    ("method", "rule"), [*((method, "reject") for method in (*METHODS, "auto")), ("tree", "descend")]
)
def test_a_round_without_kernels_uses_valid_indices_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, rule: str
) -> None:
    launches = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda kernel, *args, **settings: launches.append(kernel))
    model = make_pair(tmp_path)
    backend = TritonBackend(TritonAttention())
    runner = FusedRunner(model, backend)
    runner.prepare(256)
    batch = Batch(runner, Drafting(method, (4, 16, 16), 4, rule, None, method == "tree"), 2, 200)
    draft = [x for x in batch.drafter.row_states() if x.is_floating_point()]
    for x in draft:  # as if requests ran: a mode can be new to a batch that decodes
        x.fill_(0.5)
    for kind, plan in itertools.product(KINDS, batch.plans or (None,)):
        engine = batch.state(Mode(True, kind, plan), slice(0, 2))
        # What earlier rounds have left in tensors that torch does not clear.
        before: dict[str, Any] = {name: x.clone() for name, x in vars(engine.cache).items() if torch.is_tensor(x)}
        compile_ahead([engine])
        for name, x in before.items():
            assert torch.equal(getattr(engine.cache, name), x), name
    assert launches
    for x in draft:
        assert (x == 0.5).all()


def test_calls_that_fail_or_hang_do_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)

    def fail() -> None:
        raise ValueError

    module._run_in_forks([fail, signal.pause, (tmp_path / "first").touch, (tmp_path / "second").touch], 2)
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second"}
