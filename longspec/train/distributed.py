"""The ranks of a run: starting them, and agreeing on things."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any, Self, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups
from torch import Tensor, nn

from longspec.errors import UserError
from longspec.models.parallel import sum_over_ranks

T = TypeVar("T")


def start_ranks() -> None:
    """Join the ranks that the launcher started (NCCL on GPUs, gloo on the CPU); a run without launcher has one rank."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))  # port 0: any that is free
    # DeepSpeed would spend half a minute compiling a CPU all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    on_gpus = deepspeed.get_accelerator().device_name() == "cuda"  # which DS_ACCELERATOR=cpu denies
    backend = "nccl" if on_gpus else "gloo"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(backend, verbose=False)


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


class Termination:
    """While it is entered, SIGTERM asks for a stop instead of ending the process at once.

    A rank that waits for its device hears of it when the call returns, at the latest at the end of the step at hand;
    one whose call never returns is what `longspec.train.peers` is for.
    """

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> Self:
        def note(number: int, frame: FrameType | None) -> None:
            self.asked = True

        self.before = signal.signal(signal.SIGTERM, note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; the same on all of them, which must call it together."""
        asked = torch.tensor(int(self.asked))
        dist.all_reduce(asked, dist.ReduceOp.MAX, group=_waiting_group())
        return bool(asked)


def ignore_sigterm(_: int) -> None:
    """For the loader's processes: a launcher signals them too, and the ranks still need them for the step at hand."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def rank_zero_first(build: Callable[[], T]) -> T:
    """`build()` on every rank, on the others once rank 0 is done, so that they find its caches. UserErrors as above."""
    built: list[T] = []
    from_rank_zero(lambda: built.append(build()))
    return built[0] if built else build()
