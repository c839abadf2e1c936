"""Launches and calls that ranks with a shared target refuse, each in one line."""

import pytest
import torch

from longspec.errors import UserError
from longspec.inference.process_group import shared_target
from longspec.signals import StopSignals

LAUNCH = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def launch(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (LAUNCH | changes).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("tp_size", "device", "gpus", "problem"),
    [
        (0, None, 0, "--tp_size: 0; it must be at least 1"),
        (3, "cpu", 0, "--tp_size 3: this launch has 2 processes"),
        (2, "cuda:1", 2, "--device cuda:1: each rank of --tp_size takes the GPU of its number"),
        (2, "cuda", 1, "--tp_size 2: 2 ranks on a machine with 1 GPUs"),
    ],
)
def test_a_launch_that_does_not_fit(
    tp_size: int, device: str | None, gpus: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    launch(monkeypatch)
    with pytest.raises(UserError, match=problem), shared_target(tp_size, device, StopSignals()):
        raise AssertionError("the context was entered")


def test_only_rank_zero_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK="1")
    with pytest.raises(SystemExit, match="2"), shared_target(3, "cpu", StopSignals()):
        raise AssertionError("the context was entered")
