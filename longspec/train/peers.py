"""A thread in every rank that notices what the main thread cannot: signals, lost ranks and a lost launcher.

A rank that waits for its device in a collective sees neither a signal nor the death of the peer that it waits for.
DeepSpeed's launcher gives the ranks of its own host 30 s each to end and knows nothing of other hosts; the `deepspeed`
command itself dies of a signal and leaves `launch.py` and the ranks running. Each rank's thread therefore watches:

- signals, through Python's wakeup socket, which is written even while the main thread is inside a C call;
- the launcher: `launch.py` and the `deepspeed` command above it;
- the other ranks, through a connection to rank 0, over which both sides send a message every second. The system closes
  it when a process ends; a process that is stopped, or a host without power, falls silent.

A signal or the end of the launcher asks all ranks to stop (`Termination`). A lost rank ends the others: the main thread
has `END_S` seconds to end by itself, then the process prints its stack and ends.
"""

import faulthandler
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait

import torch.distributed as dist

from longspec.errors import UserError
from longspec.signals import STOP_SIGNALS, exit_code
from longspec.train.connections import connect_ranks
from longspec.train.distributed import Termination, from_every_rank, launched_rank
from longspec.train.launcher import Launcher

logger = logging.getLogger(__name__)

TICK_S = 1
SILENT_S = 120
"""Seconds without a message after which a rank counts as stopped. A C call that holds Python's lock is silent, too."""
END_S = 15
"""Seconds that the main thread has to end after a peer is lost."""
QUIET_S = 2
"""Seconds in which ranks that end together say nothing about each other."""
AT_ONCE_S = 5
"""Seconds that the main thread has to end if a stop is asked for before the first step."""
MESSAGE = struct.Struct("!II")
BEAT, STOP, GONE, SILENT = range(4)
"""Kinds of message; their second number is the sender's rank, a signal's number, or the lost rank."""
HOW = {GONE: "is gone", SILENT: "does not answer"}


@contextmanager
def watched(termination: Termination) -> Iterator["Watch"]:
    """Watch signals and the launcher and, once `connect` was called on all ranks, the other ranks.

    A rank that dies or leaves the context by an exception ends the others within half a minute, one that is stopped
    (SIGSTOP) within SILENT_S more.
    """
    watch = Watch(termination)
    broken = False
    try:
        yield watch
        if watch.peers:
            from_every_rank(None)  # From here on a rank may end.
    except (UserError, SystemExit):
        raise  # The error line is already printed. Do not cut off W&B's upload.
    except BaseException:
        if termination.at_once and termination.received is not None:  # the others have ended already
            raise SystemExit(exit_code(termination.received)) from None
        broken = True  # what this rank leaves on the device may keep it from ending
        raise
    finally:
        watch.close()
        if broken:
            _end_soon()
        else:
            faulthandler.cancel_dump_traceback_later()


class Watch:
    """The watching thread of this rank."""

    def __init__(self, termination: Termination) -> None:
        self.termination = termination
        self.peers: dict[socket.socket, int] = {}
        self._heard: dict[int, float] = {}
        self._launcher = Launcher()
        self._over = threading.Event()
        self._asked = self._interrupted = False
        self._last_resort: threading.Timer | None = None
        self._inbox, self._outbox = socket.socketpair()
        self._inbox.setblocking(False)
        self._outbox.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._leave)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    def connect(self) -> None:
        """Watch the other ranks from now on. All ranks call this together."""
        if dist.get_world_size() > 1:
            found = connect_ranks()
            self._heard = dict.fromkeys(found.values(), time.monotonic())
            self.peers = found
            self._wake()

    def close(self) -> None:
        self._over.set()
        self._wake()
        self._thread.join()
        if self._last_resort:
            self._last_resort.cancel()
        signal.set_wakeup_fd(self._wakeup_before)
        for connection in self.peers:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # also where a child process still has it
        self._close_sockets()

    def _leave(self) -> None:
        """In a forked child: a loading process that outlives its rank must not keep the connections open."""
        if not self._over.is_set():
            signal.set_wakeup_fd(-1)
            self._close_sockets()

    def _close_sockets(self) -> None:
        for one in (*self.peers, self._inbox, self._outbox):
            one.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            self._outbox.send(b"\0")

    def _run(self) -> None:
        last_beat = time.monotonic()
        while True:
            ready = wait([self._inbox, *self.peers], TICK_S)
            if self._inbox in ready:
                self._hear_signals(self._inbox.recv(1024))
            if self._over.is_set():
                return
            lost = [news for peer in [*self.peers] if peer in ready and (news := self._hear_peer(peer))]
            now = time.monotonic()
            if now - last_beat >= TICK_S:
                if now - last_beat > SILENT_S / 2:  # this rank was stopped itself, maybe with all others
                    self._heard = dict.fromkeys(self._heard, now)
                last_beat = now
                self._tell(BEAT, 0)
                lost += [(SILENT, rank) for rank, heard in self._heard.items() if now - heard > SILENT_S]
                if self._launcher.is_gone():
                    self._stop(signal.SIGTERM, "the launcher is gone")
            if lost:
                return self._end(*lost[0])

    def _hear_signals(self, numbers: bytes) -> None:
        """Bytes of the wakeup socket: the numbers of the signals that this process received, and those of `_wake`."""
        for number in numbers:
            if number == signal.SIGINT and self._interrupted:  # the main thread is in a call that never returns
                os._exit(exit_code(number))
            self._interrupted |= number == signal.SIGINT
            if number in STOP_SIGNALS:
                self._stop(number)

    def _hear_peer(self, peer: socket.socket) -> tuple[int, int] | None:
        """Read one message; how a rank was lost and which, if that is the news."""
        rank, message = self.peers[peer], b""
        with suppress(OSError):
            while len(message) < MESSAGE.size and (part := peer.recv(MESSAGE.size - len(message))):
                message += part
        if len(message) < MESSAGE.size:
            if not (self._asked and self.termination.at_once):
                return GONE, rank
            del self.peers[peer], self._heard[rank]  # it ends at once, as this rank does
            return None
        self._heard[rank] = time.monotonic()
        kind, number = MESSAGE.unpack(message)
        if kind == STOP:
            self._stop(number)
        return (kind, number) if kind in HOW else None

    def _tell(self, kind: int, number: int) -> None:
        for peer in self.peers:
            with suppress(OSError):
                peer.sendall(MESSAGE.pack(kind, number))

    def _stop(self, number: int, cause: str | None = None) -> None:
        """Ask this rank to stop, and all others through rank 0."""
        if self._asked:
            return
        self._asked = True
        self._tell(STOP, number)
        asked = self.termination
        asked.cause = cause
        if asked.received is None:
            asked.received = number
        if asked.at_once:
            if launched_rank() == 0:  # it speaks for all
                logger.warning("%s: stopped before the first step", asked)
            self._last_resort = threading.Timer(AT_ONCE_S, os._exit, [exit_code(asked.received)])
            self._last_resort.daemon = True
            self._last_resort.start()
            os.kill(os.getpid(), signal.SIGTERM)  # makes the main thread end if it can

    def _end(self, how: int, rank: int) -> None:
        """A rank is lost: tell the others, and give the main thread END_S seconds."""
        self._tell(how, rank)
        _end_soon()
        if not self._over.wait(QUIET_S):
            logger.warning("rank %d %s: this one ends, too, within %d s", rank, HOW[how], END_S)


def _end_soon() -> None:
    """Without Python, whose lock a stuck main thread might hold."""
    faulthandler.dump_traceback_later(END_S, exit=True)
