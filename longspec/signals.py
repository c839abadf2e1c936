"""SIGTERM, SIGINT and SIGHUP as requests to stop, which let the program finish and save its current work; and the end
of a process with its parent."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that ask a process to stop, as far as the platform has them."""
PARENT_DEATH_SIGNAL = 1
"""Linux's number of the request for a signal when the parent ends."""
RETRY_S = 0.01
"""Seconds from an exit that Python has dropped to the next try."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def exit_code(signal_number: int) -> int:
    """The exit code after a signal, by the convention of shells."""
    return 128 + signal_number


def end_with_parent(by: signal.Signals = signal.SIGTERM) -> None:
    """Ask for a signal when the process that started this one ends. Only Linux can do that."""
    if LIBC is not None:
        LIBC.prctl(PARENT_DEATH_SIGNAL, by)


def is_first_rank() -> bool:
    """Whether this process is rank 0 of a launch, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Context in which a signal has another handler. For the main thread."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        # Python returns None for a handler that C code installed.
        signal.signal(number, before if before is not None else signal.SIG_DFL)


@contextmanager
def stop_signals_handled(handler: Any) -> Iterator[None]:
    """Context in which stop signals have another handler, unless they are ignored (`nohup` ignores SIGHUP). Outside the
    main thread, where Python allows no handlers, it does nothing."""
    with ExitStack() as handlers:
        for number in STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ():
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers.enter_context(handled(number, handler))
        yield


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Context at whose end the first stop signal takes effect. `stop_signals_handled` says where."""
    late: list[int] = []
    with stop_signals_handled(lambda number, frame: late.append(number)):
        yield
    for number in late[:1]:
        signal.raise_signal(number)


class StopSignals:
    """Context manager that records requests to stop.

    A second SIGINT kills the process; on a terminal, the first one says so. `stop_signals_handled` says which signals
    have a handler.
    """

    received: int | None = None
    """Number of the first signal; None before it."""
    cause: str | None = None
    """Reason of the request that is shown to the user, if it is not a signal."""

    def __init__(self, at_once: bool = False, note: str | None = None) -> None:
        """at_once: whether the first signal raises SystemExit(exit_code(received)) in the main thread.

        The attribute may be changed inside the context: true while a model loads, false once there is work to save.
        note: text that rank 0 prints to stderr after the name of a signal that ends it at once; None prints nothing.
        """
        self.at_once = at_once
        self._note = note
        self._handlers = ExitStack()
        self._raised = False

    def __enter__(self) -> Self:
        self._handlers.enter_context(stop_signals_handled(self._record))
        self._hook, sys.unraisablehook = sys.unraisablehook, self._note_dropped
        self._handlers.callback(setattr, sys, "unraisablehook", self._hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handlers.close()
        says = self._note is not None and self.at_once and is_first_rank()
        if says and self.received is not None and kind is not None and issubclass(kind, SystemExit):
            print(f"stopped by {signal.Signals(self.received).name}{self._note}", file=sys.stderr)

    def _note_dropped(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Python drops exceptions that are raised in a destructor, where the signal may have arrived."""
        if dropped.exc_type is not SystemExit or not self._raised:
            self._hook(dropped)
            return
        self._raised = False
        # SIGTERM, because a second SIGINT would kill the process. The first signal stays the one that is received.
        retry = threading.Timer(RETRY_S, os.kill, (os.getpid(), signal.SIGTERM))
        self._handlers.callback(retry.cancel)
        retry.start()

    def _record(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            # The default handler acts on a second SIGINT even while the main thread is inside a C call.
            signal.signal(number, signal.SIG_DFL)
            if self.received is None and not self.at_once and is_first_rank() and sys.stderr.isatty():
                # Not print, which the signal may have interrupted.
                os.write(sys.stderr.fileno(), b"\nstopping after the current work; Ctrl-C again ends it at once\n")
        if self.received is None:
            self.received = number
        if self.at_once and not self._raised:
            self._raised = True
            raise SystemExit(exit_code(self.received))
