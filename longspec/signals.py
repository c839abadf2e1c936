"""SIGTERM, SIGINT and SIGHUP as requests to stop: the work at hand is finished and saved first."""

import signal
import threading
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]


def exit_code(signal_number: int) -> int:
    """The exit code of a command that a signal stopped, as shells count it."""
    return 128 + signal_number


class StopSignals:
    """Context manager that notes the signals that ask a process to end.

    A second SIGINT kills the process. A signal that is ignored on entry stays ignored (`nohup` ignores SIGHUP). Outside
    the main thread, where Python allows no handlers, nothing changes.
    """

    received: int | None = None
    """Number of the first signal."""

    def __init__(self, at_once: bool = False) -> None:
        """at_once: whether the first signal raises SystemExit(exit_code(received)) in the main thread.

        The attribute may change on the way: true while a model is loaded, false once there is something to save.
        """
        self.at_once = at_once
        self._before: dict[int, Any] = {}
        self._ends = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set by Python
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # for the second one, which then needs no Python to be heard
        if self.received is None:
            self.received = number
        if self.at_once and not self._ends:
            self._ends = True
            raise SystemExit(exit_code(self.received))
