"""Compilation ahead of the first round: a round in which no kernel runs uses valid indices and changes nothing."""

import itertools
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import make_pair

pytest.importorskip("triton")
from kernel_devices import INTERPRETED
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

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


def test_kernels_are_compiled_once_with_their_launchers_and_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations, launchers, taken = module._Compilations(), [], []
    monkeypatch.setattr(module, "_run_in_forks", lambda calls, count: [call() for call in calls])
    active = SimpleNamespace(launcher_cls=lambda src, _: launchers.append(src))
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    numbers = range(module.FEW_KERNELS + 2)
    for number in (*numbers, 0):
        kernel = SimpleNamespace(src=number, metadata=None)
        compilations.submit(str(number), lambda kernel=kernel: kernel, taken.append)
    compilations.finish()
    assert launchers == [kernel.src for kernel in taken] == list(numbers)


NEEDS_MODE = pytest.mark.skipif(module.active_mode is None, reason="this Triton compiles one kernel at a time")


@NEEDS_MODE
def test_threads_that_compile_ahead_take_turns_and_leave_launches_as_they_were() -> None:
    launch, has_begun = JITFunction.run, Event()

    def compile_too() -> None:
        with module.compiling_only():
            has_begun.set()

    with ThreadPoolExecutor(1) as pool:
        with module.compiling_only():
            replaced = JITFunction.run
            other = pool.submit(compile_too)
            assert not has_begun.wait(0.2)
            assert JITFunction.run is replaced
        other.result()
    assert JITFunction.run is launch


@NEEDS_MODE
def test_an_error_of_the_compiler_leaves_no_mode_behind() -> None:
    def fail() -> None:
        raise RuntimeError("no code")

    with pytest.raises(RuntimeError, match="no code"), module.compiling_only():
        module.active_mode.get().submit("key", fail, lambda kernel: None)
    assert module.active_mode.get() is None
