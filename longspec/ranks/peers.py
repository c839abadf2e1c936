"""A watching thread in every rank, which notices signals, lost ranks and a lost launcher.

The main thread cannot: while it waits for its device in a collective, it sees neither a signal nor the death of a peer.
DeepSpeed's launcher gives the ranks of its own host 30 s to end and knows nothing of other hosts. The `deepspeed`
command dies of a signal and leaves `launch.py` and the ranks running. Each rank's thread therefore watches:

- signals, through Python's wakeup socket, which is written even while the main thread is inside a C call;
- the launcher: `launch.py` and the `deepspeed` command above it;
- the other ranks, through a connection to rank 0 with one message per second in each direction. The operating system
  closes it when a process ends. A stopped process, or a host without power, falls silent.

A signal or the end of the launcher asks all ranks to stop (`Termination`). A lost rank ends the others: the main thread
has `END_S` seconds to end by itself, then the process prints its stack and exits.
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
from longspec.ranks.agreement import Termination, from_every_rank, launched_ranks
from longspec.ranks.connections import connect_ranks, receive
from longspec.ranks.launcher import Launcher
from longspec.signals import STOP_SIGNALS, StopSignals, exit_code

logger = logging.getLogger(__name__)

TICK_S = 1
"""Seconds between two messages to a peer."""
SILENT_S = 120
"""Seconds without a message after which a rank is considered stopped. A long C call that holds the GIL is silent."""
END_S = 15
"""Seconds that the main thread has to end after a peer is lost."""
QUIET_S = 2
"""Seconds before a lost peer is logged. Ranks that end together do not report each other."""
AT_ONCE_S = 5
"""Seconds that the main thread has to end after a request to stop before the first step."""
MESSAGE = struct.Struct("!II")
"""Format of a message: its kind and a number."""
BEAT, STOP, GONE, SILENT = range(4)
"""Kinds of message. The number is 0 in a beat, the signal in STOP, and the lost rank in the other two."""
LOSSES = {GONE: "is gone", SILENT: "does not answer"}
"""Kinds of message that report a lost rank, and how it was lost."""


@contextmanager
def watched(termination: StopSignals) -> Iterator["PeerWatch"]:
    """Watch signals, the launcher and, after `PeerWatch.connect`, the other ranks.

    A rank that dies or leaves the context by an exception ends the others within half a minute, a stopped one (SIGSTOP)
    within SILENT_S more.
    """
    watch = PeerWatch(termination)
    broken = False
    try:
        yield watch
        # A barrier. From here on a rank may end without being lost.
        if watch.peers:
            from_every_rank(None)
    except (UserError, SystemExit):
        # The error line is already printed. Do not cut off W&B's upload.
        raise
    except BaseException:
        # The error follows from the end of the other ranks.
        if termination.at_once and termination.received is not None:
            raise SystemExit(exit_code(termination.received)) from None
        # Work that is queued on the device may keep this rank from ending.
        broken = True
        raise
    finally:
        watch.close()
        if broken:
            _end_soon()
        else:
            faulthandler.cancel_dump_traceback_later()


class PeerWatch:
    """The watching thread of this rank."""

    def __init__(self, termination: StopSignals) -> None:
        self.termination = termination
        self.peers: dict[socket.socket, int] = {}
        """Rank of the peer at each connection."""
        self._last_heard: dict[int, float] = {}
        """Time of the last message of each peer."""
        self._lost_rank: int | None = None
        self._has_lost = threading.Event()
        self._launcher = Launcher()
        self._closed = threading.Event()
        self._stopping = False
        """Whether a request to stop was handled."""
        self._interrupted = False
        """Whether a SIGINT was received."""
        self._exit_timer: threading.Timer | None = None
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
            peers = connect_ranks()
            self._last_heard = dict.fromkeys(peers.values(), time.monotonic())
            # Last, because the thread reads it.
            self.peers = peers
            self._wake()

    def lost_rank(self) -> int | None:
        """The rank that is gone or silent, if any after QUIET_S seconds. Collectives may fail before it is known."""
        self._has_lost.wait(QUIET_S)
        return self._lost_rank

    def close(self) -> None:
        """End the thread and the connections."""
        self._closed.set()
        self._wake()
        self._thread.join()
        if self._exit_timer:
            self._exit_timer.cancel()
        signal.set_wakeup_fd(self._wakeup_before)
        for connection in self.peers:
            with suppress(OSError):
                # Unlike `close`, this takes effect even if a child process has a copy of the socket.
                connection.shutdown(socket.SHUT_RDWR)
        self._close_sockets()

    def _leave(self) -> None:
        """Close the sockets in a forked child. A loading process that outlives its rank must not keep them open."""
        if not self._closed.is_set():
            signal.set_wakeup_fd(-1)
            self._close_sockets()

    def _close_sockets(self) -> None:
        for connection in (*self.peers, self._inbox, self._outbox):
            connection.close()

    def _wake(self) -> None:
        """Make the thread look at its state now."""
        with suppress(BlockingIOError):
            self._outbox.send(b"\0")

    def _run(self) -> None:
        """The loop of the thread, until it is closed or a peer is lost."""
        last_beat = time.monotonic()
        while True:
            ready = wait([self._inbox, *self.peers], TICK_S)
            if self._inbox in ready:
                self._hear_signals(self._inbox.recv(1024))
            if self._closed.is_set():
                return
            losses = [loss for peer in [*self.peers] if peer in ready and (loss := self._hear_peer(peer))]
            now = time.monotonic()
            if now - last_beat >= TICK_S:
                losses += self._beat(now, since=last_beat)
                last_beat = now
            if losses:
                return self._end(*losses[0])

    def _beat(self, now: float, since: float) -> list[tuple[int, int]]:
        """Send a message to the peers and check the launcher. Returns the silent peers as (SILENT, rank)."""
        # After a long gap this rank was stopped itself, possibly together with the others.
        if now - since > SILENT_S / 2:
            self._last_heard = dict.fromkeys(self._last_heard, now)
        self._tell(BEAT, 0)
        if self._launcher.is_gone():
            self._stop(signal.SIGTERM, "the launcher is gone")
        return [(SILENT, rank) for rank, heard in self._last_heard.items() if now - heard > SILENT_S]

    def _hear_signals(self, numbers: bytes) -> None:
        """Handle bytes of the wakeup socket: the numbers of received signals, and zeros from `_wake`."""
        for number in numbers:
            # A second SIGINT ends the process even if the main thread is in a call that never returns.
            if number == signal.SIGINT and self._interrupted:
                os._exit(exit_code(number))
            self._interrupted |= number == signal.SIGINT
            if number in STOP_SIGNALS:
                self._stop(number)

    def _hear_peer(self, peer: socket.socket) -> tuple[int, int] | None:
        """Read one message. Returns (GONE or SILENT, rank) if it means that a rank is lost."""
        rank = self.peers[peer]
        message = receive(peer, MESSAGE.size)
        if len(message) < MESSAGE.size:
            if not (self._stopping and self.termination.at_once):
                return GONE, rank
            # Before the first step ranks end immediately after a request to stop.
            del self.peers[peer], self._last_heard[rank]
            return None
        self._last_heard[rank] = time.monotonic()
        kind, number = MESSAGE.unpack(message)
        if kind == STOP:
            self._stop(number)
        return (kind, number) if kind in LOSSES else None

    def _tell(self, kind: int, number: int) -> None:
        """Send a message to all peers."""
        for peer in self.peers:
            with suppress(OSError):
                peer.sendall(MESSAGE.pack(kind, number))

    def _stop(self, number: int, cause: str | None = None) -> None:
        """Ask this rank to stop, and all others through rank 0."""
        if self._stopping:
            return
        self._stopping = True
        self._tell(STOP, number)
        termination = self.termination
        termination.cause = cause
        if termination.received is None:
            termination.received = number
        if termination.at_once:
            # One line for all ranks. The commands of inference print their own.
            if launched_ranks()[0] == 0 and isinstance(termination, Termination):
                logger.warning("%s: stopped before the first step", termination)
            self._exit_timer = threading.Timer(AT_ONCE_S, os._exit, [exit_code(termination.received)])
            self._exit_timer.daemon = True
            self._exit_timer.start()
            # The handler of this signal ends the main thread, unless it is stuck in a C call.
            os.kill(os.getpid(), signal.SIGTERM)

    def _end(self, loss: int, rank: int) -> None:
        """Report a lost rank to the others, and give the main thread END_S seconds to end."""
        self._lost_rank = rank
        self._has_lost.set()
        self._tell(loss, rank)
        _end_soon()
        if not self._closed.wait(QUIET_S):
            logger.warning("rank %d %s; this rank ends within %d s", rank, LOSSES[loss], END_S)


def _end_soon() -> None:
    """Exit after END_S seconds from a C thread, because a stuck main thread might hold the GIL."""
    faulthandler.dump_traceback_later(END_S, exit=True)
