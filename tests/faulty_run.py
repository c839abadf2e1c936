"""The trainer with the fault that the environment variable FAULT names. A run script for the launcher."""

import os
import sys

import torch

from longspec.train import run
from longspec.train.steps import OptimizerSteps

STEP = 3
rank, fault = int(os.environ["RANK"]), os.environ["FAULT"]
train_step, forward = OptimizerSteps.take, OptimizerSteps.forward


def one_rank_ends(self: OptimizerSteps, step: int, *args: object) -> object:
    if step == STEP and rank == 1:
        if fault == "dies":
            os.kill(os.getpid(), 9)
        raise ValueError("this rank has had enough")
    return train_step(self, step, *args)  # type: ignore[arg-type]


def loss_is_nan(self: OptimizerSteps, micro_step: int, batch: dict) -> tuple:
    loss, terms = forward(self, micro_step, batch)
    if micro_step == (STEP - 1) * self.accumulation + 1 and rank == 1:
        return loss * torch.nan, {name: term * torch.nan for name, term in terms.items()}
    return loss, terms


def disks_are_local() -> None:
    """Change to a folder per rank, so that a relative output_dir is local to each rank."""
    sys.argv[1:] = [os.path.abspath(given) if given.startswith("conf/") else given for given in sys.argv[1:]]
    os.chdir(os.path.join(os.environ["DISKS"], str(rank)))


if fault in ("throws", "dies"):
    OptimizerSteps.take = one_rank_ends  # type: ignore[assignment, method-assign]
elif fault == "nan":
    OptimizerSteps.forward = loss_is_nan  # type: ignore[assignment, method-assign]
elif fault == "local":
    disks_are_local()
else:
    sys.exit(f"FAULT: {fault!r} is unknown")
run.main()
