"""Starting the ranks of a run, and agreement between them."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
"""Seconds after which a rank that waits for the others logs a warning."""


def launched_rank() -> int:
    """This process's rank, from the environment variables that the launcher sets.

    Sets the missing variables for a run without a launcher. Raises UserError if the environment is contradictory.
    """
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    rank = _environment_number("RANK", defaults["RANK"])
    world_size = _environment_number("WORLD_SIZE", defaults["WORLD_SIZE"])
    # Defaults are for one process only; guessed values would make ranks wait for each other.
    missing = [name for name in defaults if name not in os.environ and name != "LOCAL_RANK"]
    if world_size > 1 and missing:
        raise UserError(
            f"environment variable WORLD_SIZE: {world_size} ranks, but {', '.join(missing)} not set; start the run "
            "with `deepspeed`, or unset WORLD_SIZE for a run on one device"
        )
    if rank >= world_size:
        raise UserError(f"environment variable RANK: {rank}, but WORLD_SIZE is {world_size}; ranks count from 0")
    # Port 0 stands for any free port.
    for name, default in defaults.items():
        os.environ.setdefault(name, str(default))
    return rank


def _environment_number(name: str, default: object) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"environment variable {name}: {value!r} is not a number; start the run with `deepspeed`")
    return int(value)


def start_ranks() -> None:
    """Join the process group: NCCL on GPUs, gloo on the CPU. A run without a launcher has one rank.

    A rank that waits longer than WAIT_S seconds for the others logs a warning. Raises UserError if they do not connect.
    """
    rank, world_size = launched_rank(), int(os.environ["WORLD_SIZE"])
    # Only inference uses DeepSpeed's CPU all-reduce, and compiling it takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The accelerator is the CPU if DS_ACCELERATOR=cpu, even on a host with GPUs.
    on_gpus = deepspeed.get_accelerator().device_name() == "cuda"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    warning = f"rank {rank} of {world_size} waits for the others; rank 0 is expected at {master}"
    # Connecting blocks without a word if one rank was started elsewhere or not at all.
    reminder = threading.Timer(WAIT_S, logger.warning, [warning])
    reminder.daemon = True
    reminder.start()
    try:
        deepspeed.init_distributed("nccl" if on_gpus else "gloo", verbose=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {rank} of {world_size} did not reach the others at {master}: {first_line(error)}"
        ) from error
    finally:
        reminder.cancel()


def data_parallel_rank_and_size() -> tuple[int, int]:
    """This rank's number among the ranks that train on different rows, and the number of such ranks."""
    if not groups.model_parallel_is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()


def summed(values: Tensor) -> Tensor:
    """`values` summed in place over the ranks that train on different rows."""
    shared = groups.model_parallel_is_initialized()
    dist.all_reduce(values, group=groups.get_data_parallel_group() if shared else None)
    return values


def summed_by_name(terms: Sequence[Mapping[str, Tensor]], divisor: float = 1) -> dict[str, float]:
    """Sums of scalars by name, over `terms` and the ranks that train on different rows, divided by `divisor`."""
    names = list(terms[0])
    sums = torch.stack([torch.stack([scalars[name] for scalars in terms]).sum() for name in names])
    # One all-reduce and one copy to the host for all names.
    values = (summed(sums) / divisor).tolist()
    return dict(zip(names, values, strict=True))


class ReplicatedDraft:
    """DeepSpeed's `mpu` for tensor parallelism: data-parallel groups, and no model parallelism.

    Only the target is split over ranks. Each rank holds the whole draft and trains it with the ranks of the same number
    in the other tensor-parallel groups. Checkpoints are therefore the same as with unsplit targets.
    """

    get_data_parallel_group = staticmethod(groups.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(groups.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(groups.get_data_parallel_world_size)
    # Without pipeline parallelism this group holds one rank.
    get_model_parallel_group = staticmethod(groups.get_pipeline_parallel_group)
    get_model_parallel_rank = staticmethod(lambda: 0)
    get_model_parallel_world_size = staticmethod(lambda: 1)


def keep_drafts_equal(draft: nn.Module) -> None:
    """Average each gradient over the ranks that share a target.

    These ranks compute the same gradients, but kernels with a nondeterministic order of summation round differently.
    """
    world = groups.get_model_parallel_world_size()
    for parameter in draft.parameters():
        parameter.register_hook(lambda gradient: sum_over_ranks(gradient.clone()).div_(world))


@cache
def _waiting_group() -> Any:
    """A gloo group with a long timeout, because ranks wait here while rank 0 tokenizes a large corpus."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=2))


def from_rank_zero(compute: Callable[[], T]) -> T:
    """The result of `compute()`, which runs on rank 0 only, on every rank. It is sent pickled.

    A UserError or SystemExit on rank 0 ends every rank with the same exit code, and the message is printed once.
    """
    result: Any = None
    stops = False
    code: str | int | None = None
    if dist.get_rank() == 0:
        try:
            result = compute()
        except UserError as error:
            # Printed before the broadcast: once one rank has ended, the launcher ends the others.
            print(f"error: {error}", file=sys.stderr)
            stops = True
            code = 2
        except SystemExit as end:
            stops = True
            code = end.code
    message = [result, stops, code]
    dist.broadcast_object_list(message, group=_waiting_group())
    result, stops, code = message
    if stops:
        raise SystemExit(code)
    return result


def share_targets(tp_size: int) -> None:
    """Form fairscale's groups of `tp_size` neighboring ranks that share a target and train on the same batch.

    If the number of ranks is not a multiple of `tp_size`, all ranks end with an error (see `from_rank_zero`).
    """
    ranks = dist.get_world_size()

    def check() -> None:
        if ranks % tp_size:
            raise UserError(
                f"config key tp_size: {ranks} ranks cannot form groups of {tp_size}; launch a multiple of {tp_size}"
            )

    from_rank_zero(check)
    # Neighbors are on one host, where the links between GPUs are fastest.
    if tp_size > 1:
        groups.initialize_model_parallel(tp_size)


def from_every_rank(value: T) -> list[T]:
    """The `value` of each rank, in order of rank. It is sent pickled."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_waiting_group())
    return values


class Termination(StopSignals):
    """A request to stop the run: a signal to any rank, or the end of the launcher.

    `longspec.train.peers` forwards it to all ranks. Before the first step it ends them immediately. During training
    each step calls `agreed`, so that all ranks stop after the same step.
    """

    cause: str | None = None
    """Reason shown to the user, if it is not a signal."""

    def __init__(self, at_once: bool = False) -> None:
        super().__init__(at_once)
        self._noticed_at: float | None = None

    def __str__(self) -> str:
        return self.cause or ("no signal" if self.received is None else signal.Signals(self.received).name)

    def agreed(self, patience_s: float = 0) -> bool:
        """Whether any rank has known of the request for at least `patience_s` seconds.

        A collective: all ranks must call it and get the same result. If it is true, `received` is the same on all, too.
        """
        if self.received is not None and self._noticed_at is None:
            self._noticed_at = time.monotonic()
        due = self._noticed_at is not None and time.monotonic() - self._noticed_at >= patience_s
        # The largest number wins, so that all ranks report the same signal.
        number = torch.tensor((self.received or 0) if due else 0)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=_waiting_group())
        if number:
            self.received = int(number)
        return bool(number)


def ignore_stop_signals(_: int) -> None:
    """Worker initialization of the data loader.

    Workers receive the signals of their process group, too, but the current step still needs them.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def rank_zero_first(build: Callable[[], T]) -> T:
    """The result of `build()`, which runs on rank 0 first, so that the other ranks find its caches.

    UserErrors on rank 0 end all ranks (see `from_rank_zero`).
    """
    built: list[T] = []
    from_rank_zero(lambda: built.append(build()))
    return built[0] if built else build()
