"""Replicas: the meeting at the end of their shares, and a process without a launcher."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from longspec.ranks import replicas
from longspec.ranks.agreement import ALONE
from longspec.ranks.replicas import STOP, Replicas, joined_replicas
from longspec.signals import StopSignals


def test_a_stop_signal_of_the_last_rank_to_arrive_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed on right before the others stop waiting, so they must look once more."""
    store = dist.HashStore()

    def arrive(**_: object) -> SimpleNamespace:
        store.set(STOP, str(int(signal.SIGTERM)))
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    monkeypatch.setattr(replicas.dist, "barrier", arrive)
    monkeypatch.setattr(replicas.dist, "new_group", lambda **_: None)
    monkeypatch.setattr(replicas, "waiting_group", lambda: None)
    monkeypatch.setattr(replicas, "from_every_rank", lambda value: [value])
    stop = StopSignals()
    Replicas(0, 2, 0, store).meet(stop)
    assert stop.received == signal.SIGTERM


def test_a_process_without_a_launcher_leaves_no_trace_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that it starts would take themselves for ranks."""
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    with joined_replicas() as alone:
        assert (alone.rank, alone.size) == (0, 1)
    assert not ALONE.keys() & os.environ.keys()
