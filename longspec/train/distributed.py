"""The ranks of a run: starting them, and agreeing on things."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups
from torch import Tensor, nn

from longspec.errors import UserError, first_line
from longspec.models.parallel import sum_over_ranks
from longspec.signals import STOP_SIGNALS, StopSignals

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 10
"""Seconds that a rank waits for the others before it says so."""


def launched_rank() -> int:
    """This process's rank, from the launcher's environment, which is completed for a run without launcher.

    Raises UserError for an environment that does not describe a launch.
    """
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    number = {}
    for name in ("RANK", "WORLD_SIZE"):
        value = os.environ.get(name, str(alone[name]))
        if not value.isdecimal():
            raise UserError(f"environment variable {name}: {value!r} is not a number; start the run with `deepspeed`")
        number[name] = int(value)
    rank, ranks = number.values()
    missing = [name for name in alone if name not in os.environ and name != "LOCAL_RANK"]
    if ranks > 1 and missing:
        raise UserError(
            f"environment variable WORLD_SIZE: {ranks} ranks, but {', '.join(missing)} not set; start the run with "
            "`deepspeed`, or unset WORLD_SIZE for a run on one device"
        )
    if rank >= ranks:
        raise UserError(f"environment variable RANK: {rank}, but WORLD_SIZE is {ranks}; ranks count from 0")
    for name, default in alone.items():
        os.environ.setdefault(name, str(default))  # port 0: any free one
    return rank


def start_ranks() -> None:
    """Join the ranks that the launcher started (NCCL on GPUs, gloo on the CPU); a run without launcher has one rank.

    A rank that waits for the others says so after WAIT_S seconds. Raises UserError if they do not come together.
    """
    rank, ranks = launched_rank(), int(os.environ["WORLD_SIZE"])
    # DeepSpeed would spend half a minute compiling a CPU all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    on_gpus = deepspeed.get_accelerator().device_name() == "cuda"  # which DS_ACCELERATOR=cpu denies
    backend = "nccl" if on_gpus else "gloo"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waits = f"rank {rank} of {ranks} waits for the others; rank 0 is expected at {master}"
    reminder = threading.Timer(WAIT_S, logger.warning, [waits])
    reminder.daemon = True
    reminder.start()
    try:
        deepspeed.init_distributed(backend, verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(f"rank {rank} of {ranks} did not reach the others at {master}: {first_line(error)}") from error
    finally:
        reminder.cancel()


def data_parallel_place() -> tuple[int, int]:
    """This rank's number among the ranks that train on different rows, and how many these are."""
    if not groups.model_parallel_is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()


def summed(values: Tensor) -> Tensor:
    """`values` summed over the ranks that train on different rows, in place."""
    shared = groups.model_parallel_is_initialized()
    dist.all_reduce(values, group=groups.get_data_parallel_group() if shared else None)
    return values


class ReplicatedDraft:
    """What DeepSpeed is told where ranks share targets (its `mpu`): who trains on different rows, and no more.

    To it the draft is not split, so each rank that shares a target trains the whole draft with those of its number in
    the other targets. A checkpoint is then what as many ranks with whole targets would have written.
    """

    get_data_parallel_group = staticmethod(groups.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(groups.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(groups.get_data_parallel_world_size)
    get_model_parallel_group = staticmethod(groups.get_pipeline_parallel_group)  # without pipelines: this rank alone
    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)


def keep_drafts_equal(draft: nn.Module) -> None:
    """Average each gradient over the ranks that share a target: kernels that add in any order round differently."""
    world = groups.get_model_parallel_world_size()
    for parameter in draft.parameters():
        parameter.register_hook(lambda gradient: sum_over_ranks(gradient.clone()).div_(world))


@cache
def _waiting_group() -> Any:
    """For waiting as long as a large corpus takes to tokenise. (A rank that dies ends the others by the launcher.)"""
    return dist.new_group(backend="gloo", timeout=timedelta(days=2))


def from_rank_zero(compute: Callable[[], T]) -> T:
    """What `compute()` returns on rank 0, on every rank (it is pickled).

    A UserError or SystemExit there ends every rank with its exit code: one bad input, one message.
    """
    outcome: list[Any] = [None, False, None]  # the result, or whether to end and the exit code
    if dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)  # now: the first rank to end makes the launcher end the others
            outcome = [None, True, 2]
        except SystemExit as end:
            outcome = [None, True, end.code]
    dist.broadcast_object_list(outcome, group=_waiting_group())
    result, ends, code = outcome
    if ends:
        raise SystemExit(code)
    return result


def share_targets(tp_size: int) -> None:
    """Let each `tp_size` neighbouring ranks share a target (fairscale's groups); they train one draft on one batch.

    A number of ranks that is no multiple of it ends them all, as `from_rank_zero` does.
    """
    ranks = dist.get_world_size()

    def check() -> None:
        if ranks % tp_size:
            raise UserError(f"config key tp_size: {ranks} ranks make no groups of {tp_size}; launch a multiple of it")

    from_rank_zero(check)
    if tp_size > 1:
        groups.initialize_model_parallel(tp_size)


def from_every_rank(mine: T) -> list[T]:
    """What each rank gave (it is pickled), in order of rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine, group=_waiting_group())
    return found


class Termination(StopSignals):
    """The request to stop a run: a signal that some rank received, or the end of the launcher.

    `longspec.train.peers` passes it on to all ranks. Before the first step it ends them at once. From then on each step
    asks `agreed`, so that all ranks stop after the same one.
    """

    cause: str | None = None
    """Reason that the user is told, if it is no signal."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__(at_once)
        self._noticed_at: float | None = None

    def __str__(self) -> str:
        return self.cause or ("no signal" if self.received is None else signal.Signals(self.received).name)

    def agreed(self, patience_s: float = 0) -> bool:
        """Whether any rank was asked to stop and noticed it at least `patience_s` seconds ago.

        The result is the same on all ranks, which must call it together; so is `received` if it is true.
        """
        if self.received is not None and self._noticed_at is None:
            self._noticed_at = time.monotonic()
        due = self._noticed_at is not None and time.monotonic() - self._noticed_at >= patience_s
        number = torch.tensor((self.received or 0) if due else 0)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=_waiting_group())
        if number:
            self.received = int(number)
        return bool(number)


def ignore_stop_signals(_: int) -> None:
    """For the loader's processes: they receive the group's signals too, and the step at hand still needs them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def rank_zero_first(build: Callable[[], T]) -> T:
    """`build()` on every rank, on the others once rank 0 is done, so that they find its caches. UserErrors as above."""
    built: list[T] = []
    from_rank_zero(lambda: built.append(build()))
    return built[0] if built else build()
