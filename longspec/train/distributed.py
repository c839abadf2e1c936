"""Starting the ranks of a training run, and sums over them."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import deepspeed
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as groups
from torch import Tensor, nn

from longspec.models.parallel import share_target, sum_over_ranks
from longspec.ranks.agreement import ALONE, connecting, fail_together, from_rank_zero, launched_ranks

T = TypeVar("T")


def start_ranks() -> None:
    """Join the process group: NCCL on GPUs, gloo on the CPU; one rank without a launcher. Raises UserError."""
    launched_ranks()  # checks the environment
    # Libraries read these variables, too.
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    # Only inference uses DeepSpeed's CPU all-reduce, and compiling it takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The accelerator is the CPU if DS_ACCELERATOR=cpu, even on a host with GPUs.
    on_gpus = deepspeed.get_accelerator().device_name() == "cuda"
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    with connecting():
        deepspeed.init_distributed("nccl" if on_gpus else "gloo", verbose=False)


def data_parallel_rank_and_size() -> tuple[int, int]:
    """This rank's number among the ranks that train on different rows, and the number of such ranks."""
    if not groups.model_parallel_is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()


def summed(values: Tensor) -> Tensor:
    """`values` summed in place over the ranks that train on different rows."""
    dist.all_reduce(values, group=groups.get_data_parallel_group() if groups.model_parallel_is_initialized() else None)
    return values


def summed_by_name(terms: Sequence[Mapping[str, Tensor]], divisor: float = 1) -> dict[str, float]:
    """Sums of scalars by name, over `terms` and the ranks that train on different rows, divided by `divisor`."""
    names = list(terms[0])
    sums = torch.stack([torch.stack([scalars[name] for scalars in terms]).sum() for name in names])
    # One all-reduce and one copy to the host for all names.
    return dict(zip(names, (summed(sums) / divisor).tolist(), strict=True))


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
    """Average each gradient over the ranks that share a target, because nondeterministic kernels round differently."""
    world = groups.get_model_parallel_world_size()
    for parameter in draft.parameters():
        parameter.register_hook(lambda gradient: sum_over_ranks(gradient.clone()).div_(world))


def share_targets(tp_size: int) -> None:
    """Form groups of `tp_size` neighboring ranks, which share target and batch. Ends all ranks if some are left."""
    if (ranks := dist.get_world_size()) % tp_size:
        fail_together(f"config key tp_size: {ranks} ranks cannot form groups of {tp_size}")
    # Neighbors are on one host, where the links between GPUs are fastest.
    if tp_size > 1:
        groups.initialize_model_parallel(tp_size)
        share_target(groups.get_model_parallel_group())


def rank_zero_first(build: Callable[[], T]) -> T:
    """The result of `build()`, which runs on rank 0 first for its caches. Ends all ranks as `from_rank_zero` does."""
    built: list[T] = []
    from_rank_zero(lambda: built.append(build()))
    return built[0] if built else build()
