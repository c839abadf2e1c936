"""Compilation ahead of the first round: a round in which no kernel runs uses valid indices and changes nothing."""

import itertools
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
from longspec.inference.engine.modes import KINDS, Mode
from longspec.inference.fused_runner import FusedRunner
from longspec.inference.methods import METHODS, Drafting
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton import compile_ahead as module
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.backend import TritonBackend


@INTERPRETED
@pytest.mark.parametrize("method", [*METHODS, "auto"])
@pytest.mark.parametrize("rule", ["reject", "descend"])
def test_a_round_without_kernels_uses_valid_indices_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, rule: str
) -> None:
    launches = []
    monkeypatch.setattr(module, "AsyncCompileMode", lambda pool: pool)  # stands in for Triton's context
    monkeypatch.setattr(GridExecutor, "__call__", lambda kernel, *args, **settings: launches.append(kernel))
    model = make_pair(tmp_path)
    backend = TritonBackend(TritonAttention(describe_gpu(torch.device("cpu"))))
    runner = FusedRunner(model, backend)
    runner.prepare(256)
    batch = Batch(runner, Drafting(method, (4, 16, 16), 4, rule, None, method == "tree"), 2, 200)
    for kind, plan in itertools.product(KINDS, batch.plans or (None,)):
        engine = batch.state(Mode(True, kind, plan), slice(0, 2))
        # What earlier rounds have left in tensors that torch does not clear.
        before: dict[str, Any] = {name: x.clone() for name, x in vars(engine.cache).items() if torch.is_tensor(x)}
        compile_ahead([engine])
        for name, x in before.items():
            assert torch.equal(getattr(engine.cache, name), x), name
    assert launches
