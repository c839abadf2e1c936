"""Where a tensor-parallel rank finds its part of the target."""

from pathlib import Path

import torch.distributed as dist


def model_parallel_place() -> tuple[int, int]:
    """This process's (rank, world size) in fairscale's model-parallel group; (0, 1) without one."""
    if not dist.is_initialized():
        return 0, 1
    from fairscale.nn.model_parallel import initialize as groups

    if not groups.model_parallel_is_initialized():
        return 0, 1
    return groups.get_model_parallel_rank(), groups.get_model_parallel_world_size()


class PretrainedModelParallelPreSplitMixin:
    """Loads a target that lies whole in `path`, or pre-split in `path/mp_{rank}-of-{world}/`."""

    @staticmethod
    def shard_path(path: str | Path) -> str:
        """The folder (or hub id) this rank loads: `path` itself when tensor parallelism is off."""
        rank, world = model_parallel_place()
        return str(path) if world == 1 else str(Path(path) / f"mp_{rank}-of-{world}")
