"""The meeting of replicas at the end of their shares."""

import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from longspec.ranks import replicas
from longspec.ranks.replicas import STOP, Replicas
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
    assert Replicas(0, 2, 0, store).meet(stop)
    assert stop.received == signal.SIGTERM
