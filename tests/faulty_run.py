"""The trainer with the fault that the environment variable FAULT names. A run script for the launcher."""

import os
import resource
import sys

import torch

from longspec.train import run, trainer
from longspec.train.steps import OptimizerSteps

STEP = 3
rank = int(os.environ["RANK"])
train_step, forward, save_checkpoint = OptimizerSteps.take, OptimizerSteps.forward, trainer.save_checkpoint


def one_rank_throws(self: OptimizerSteps, step: int, *args: object) -> object:
    if step == STEP and rank == 1:
        raise ValueError("this rank has had enough")
    return train_step(self, step, *args)  # type: ignore[arg-type]


def one_rank_dies(self: OptimizerSteps, step: int, *args: object) -> object:
    if step == STEP and rank == 1:
        os.kill(os.getpid(), 9)
    return train_step(self, step, *args)  # type: ignore[arg-type]


def loss_is_nan(self: OptimizerSteps, micro_step: int, batch: dict) -> tuple:
    loss, terms = forward(self, micro_step, batch)
    if micro_step == (STEP - 1) * self.accumulation + 1 and rank == 1:
        return loss * torch.nan, {name: term * torch.nan for name, term in terms.items()}
    return loss, terms


def disk_is_full(engine: object, tokenizer: object, config: object, progress: trainer.Progress, *more: object) -> None:
    if progress.step == STEP + 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    save_checkpoint(engine, tokenizer, config, progress, *more)  # type: ignore[arg-type]


def disks_are_local() -> None:
    """Change to a folder per rank, so that a relative output_dir is local to each rank."""
    sys.argv[1:] = [os.path.abspath(given) if given.startswith("conf/") else given for given in sys.argv[1:]]
    os.chdir(os.path.join(os.environ["DISKS"], str(rank)))


fault = os.environ["FAULT"]
if fault == "throws":
    OptimizerSteps.take = one_rank_throws  # type: ignore[assignment, method-assign]
elif fault == "dies":
    OptimizerSteps.take = one_rank_dies  # type: ignore[assignment, method-assign]
elif fault == "nan":
    OptimizerSteps.forward = loss_is_nan  # type: ignore[assignment, method-assign]
elif fault == "local":
    disks_are_local()
elif fault == "full":
    trainer.save_checkpoint = disk_is_full  # type: ignore[assignment]
else:
    sys.exit(f"FAULT: {fault!r} is unknown")
run.main()
