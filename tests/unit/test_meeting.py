"""Replicas: the meeting at the end of their shares, and a process without a launcher."""

import os

import pytest

from longspec.ranks.agreement import ALONE
from longspec.ranks.replicas import joined_replicas


def test_a_process_without_a_launcher_leaves_no_trace_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that it starts would take themselves for ranks."""
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    with joined_replicas() as alone:
        assert (alone.rank, alone.size) == (0, 1)
    assert not ALONE.keys() & os.environ.keys()
