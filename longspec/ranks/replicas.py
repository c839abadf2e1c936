"""The replicas of a command: the ranks of a torchrun launch. Each has a copy of the model and a share of the work.

Ranks do not exchange tensors. They agree on the work before it starts, count finished items in a shared counter, and
meet at the end. A command without a launcher is a single replica, for which all of this costs nothing.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import transformers

from longspec.ranks import agreement
from longspec.signals import StopSignals

T = TypeVar("T")

CONNECT = timedelta(minutes=5)
"""Time in which all ranks must connect."""
POLL_S = 0.1
"""Seconds between two looks at stop signals while a rank waits for the others."""
STOP = "stop"
"""Key of the store that holds the number of the first stop signal."""


class Replicas:
    """The ranks of a launch, as seen by one of them. If another one has ended, the collectives end this one, too."""

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, store: dist.Store | None = None) -> None:
        """store: shared by all ranks; None for a single one. Use `joined_replicas`."""
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._store = store or dist.HashStore()
        self._run = 0

    def device(self, device: str | None) -> str | None:
        """The device of this rank for the option `--device`: the GPU with the number of the rank on its host."""
        if self.size == 1 or device not in (None, "cuda") or not torch.cuda.is_available():
            return device
        if self.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    def from_rank_zero(self, compute: Callable[[], T]) -> T:
        """The result of `compute()`, which runs on rank 0 only, on every rank; see `agreement.from_rank_zero`."""
        if self.size == 1:
            return compute()
        outcome = agreement.outcome_of(compute) if self.rank == 0 else None
        with self._connected():
            return agreement.agreed_outcome(outcome)

    def together(self, build: Callable[[], T]) -> T:
        """The result of this rank's own `build()`. A UserError on any rank ends all, and the first one is printed."""
        if self.size == 1:
            return build()
        built, problem = agreement.attempt(build)
        problems = [(rank, text) for rank, text in enumerate(self.gather(problem)) if text is not None]
        if problems:
            rank, text = problems[0]
            with self._connected():
                agreement.fail_together(f"rank {rank}: {text}" if rank else text)
        return built[0]

    def rank_zero_first(self, build: Callable[[], T]) -> T:
        """The result of `build()`, which runs on rank 0 first, so that the others find downloads and caches."""
        built: list[T] = []
        self.from_rank_zero(lambda: built.append(build()))
        return self.together(lambda: built[0] if built else build())

    def gather(self, value: T) -> list[T]:
        """The `value` of each rank, in order of rank. It is sent pickled."""
        if self.size == 1:
            return [value]
        with self._connected():
            return agreement.from_every_rank(value)

    def check_shared(self, folder: Path) -> None:
        """End all ranks with an error unless all of them see the files that rank 0 writes to a folder."""
        if self.size > 1:
            with self._connected():
                agreement.check_shared(folder)

    def share(self, loads: Sequence[int]) -> list[int]:
        """The indices of this rank's items. They are dealt to the ranks in turn, the largest load first."""
        by_load = sorted(range(len(loads)), key=lambda index: -loads[index])
        return sorted(by_load[self.rank :: self.size])

    def start_count(self) -> None:
        """Start another shared counter at 0. All ranks must call it, before they count."""
        self._run += 1

    def count(self, items: int) -> int:
        """Add to the shared counter, and return its value, to which all ranks have added."""
        with self._connected():
            return self._store.add(f"count/{self._run}", items)

    def stopped(self, stop: StopSignals) -> bool:
        """Whether a stop signal has reached any rank. Then `stop.received` is set on this rank, too."""
        with self._connected():
            if stop.received is not None:
                self._store.set(STOP, str(stop.received))
            elif self._store.check([STOP]):
                stop.received = int(self._store.get(STOP))
        return stop.received is not None

    def meet(self, stop: StopSignals, watch: Callable[[], object]) -> None:
        """Wait until every rank has called this.

        Stop signals are passed on meanwhile, so that the others come after their current work. watch: called every
        POLL_S seconds, and once more after it.
        """
        if self.size == 1:
            return
        with self._connected():
            self.stopped(stop)
            arrival = dist.barrier(group=agreement.waiting_group(), async_op=True)
            while not arrival.is_completed():
                self.stopped(stop)
                watch()
                time.sleep(POLL_S)
            arrival.wait()
            # The last rank may have come because of a signal, which it passed on just before.
            self.stopped(stop)
            watch()
            # Rank 0 may host the store, so it leaves after the last use of it.
            agreement.from_every_rank(None)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """End this process with a line if the connection is broken."""
        try:
            yield
        except RuntimeError as error:
            raise SystemExit(
                f"rank {self.rank} of {self.size} ends, because another rank has ended; the same command continues"
            ) from error


@contextmanager
def joined_replicas(tp_size: int) -> Iterator[Replicas]:
    """The replicas of this process's launch, connected until the context ends.

    tp_size: number of ranks that share a target (see `inference.process_group`); several are a single replica. Raises
    UserError for an environment that no launcher sets, and if the ranks do not connect.
    """
    rank, size = agreement.launched_ranks()
    if size == 1 or tp_size > 1:
        yield Replicas()
        return
    with agreement.connecting():
        store, _, _ = next(dist.rendezvous("env://", timeout=CONNECT))
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=size, timeout=CONNECT)
    if rank > 0:
        transformers.utils.logging.disable_progress_bar()
    try:
        yield Replicas(rank, size, int(os.environ.get("LOCAL_RANK", 0)), dist.PrefixStore("replicas", store))
    finally:
        dist.destroy_process_group()
