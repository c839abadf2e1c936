"""Requests to stop: the recorded signals, and when they take effect."""

import signal

import pytest

from longspec.ranks.agreement import Termination
from longspec.signals import STOP_SIGNALS, StopSignals, exit_code


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_the_old_handlers_come_back(number: int) -> None:
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == number
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before


def test_at_once_ends_on_the_first_signal_only() -> None:
    """A second signal must not interrupt the cleanup after the first one's SystemExit."""
    with StopSignals(at_once=True) as stop, pytest.raises(SystemExit) as end:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned_up = True
    assert cleaned_up and end.value.code == exit_code(signal.SIGHUP) == 129 and stop.received == signal.SIGHUP


def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_may_be_finished_for_a_while(one_rank: None) -> None:
    """`train_step` passes a patience inside a step and 0 before it."""
    termination = Termination()
    assert not termination.agreed() and not termination.agreed(0)
    termination.received = signal.SIGINT
    assert not termination.agreed(100) and termination.agreed()
    assert termination.received == signal.SIGINT


def test_a_second_sigint_kills() -> None:
    """The kernel kills the process, even while the main thread waits for a device."""
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
