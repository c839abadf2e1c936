"""The loop over the optimizer steps of a run."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from longspec.ranks.agreement import Termination, from_every_rank, from_rank_zero
from longspec.train.checkpoint import read_best, save_best, save_checkpoint
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import data_parallel_rank_and_size, rank_zero_first
from longspec.train.evaluation import Evaluation, evaluates_after
from longspec.train.inputs import Inputs
from longspec.train.logging import RunLog
from longspec.train.loss import DraftLoss
from longspec.train.markers import Marker
from longspec.train.resume import FRESH, Start
from longspec.train.sampler import ResumableSampler, loader
from longspec.train.steps import OptimizerSteps

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The loop over optimizer steps. Every rank has one and takes every step; only rank 0 logs."""

    config: TrainConfig
    engine: Any
    inputs: Inputs
    total_steps: int
    start: Start = FRESH
    held_out_rows: int = 0
    """Number of rows per evaluation, 0 for no evaluation."""
    evaluation_due: bool = False
    """Whether the last step's evaluation was interrupted."""
    best_acceptance_length: float = -math.inf

    def __post_init__(self) -> None:
        config, engine, inputs = self.config, self.engine, self.inputs
        accumulation = config.gradient_accumulation_steps
        rank, self.world_size = data_parallel_rank_and_size()
        sampler = ResumableSampler(
            rows=len(inputs.rows),
            batch_size=config.per_device_train_batch_size,
            rank=rank,
            world_size=self.world_size,
            seed=config.seed,
            start=self.start.step * accumulation,
            stop=self.total_steps * accumulation,
        )
        self.loader = loader(inputs, sampler, config.data.num_workers, accumulation)
        vocabulary = engine.module.draft_model.vocabulary
        objective = DraftLoss(config.loss, config.log_target_loss, vocabulary=vocabulary)
        self.steps = OptimizerSteps(config, engine, inputs, objective, sampler)
        self.evaluation = Evaluation(config, engine, inputs, objective, self.held_out_rows)

    def run(self, termination: Termination) -> bool:
        """Train up to the last step, evaluate and save on the way, and save the last step.

        Returns False if a request to stop came before the end of the last step and its evaluation. The last finished
        step is saved in that case, too.
        """
        self.engine.train()
        # Iterating starts the loading processes. They load while rank 0 opens the log.
        arrays = iter(self.loader)
        step = saved_step = self.start.step
        if step and self.config.evaluation.keep_best:
            self.best_acceptance_length = from_rank_zero(lambda: read_best(self.config, self.start.run))
        log = rank_zero_first(lambda: RunLog(self.config, dist.get_rank(), step, self.total_steps))

        # Up to this barrier a signal ends all ranks immediately. From here on they stop together after a step.
        from_every_rank(None)
        termination.at_once = False

        if self.evaluation_due and (evaluated := self.evaluate(step, termination)):
            log.step({"step": step, **evaluated})
        self.steps.start(step + 1, arrays)
        while self.steps.micro_batches and (metrics := self.steps.take(step + 1, termination)) is not None:
            step += 1
            if self.held_out_rows and evaluates_after(step, self.config, self.total_steps):
                metrics |= self.evaluate(step, termination)
            log.step({"step": step, **metrics})
            if step % self.config.save_steps == 0 or step == self.total_steps:
                self.save(step)
                saved_step = step
        if step > saved_step:
            self.save(step)

        finished = step == self.total_steps and not self.evaluation_due
        if not finished:
            during = ", in its evaluation" if self.evaluation_due else ""
            advice = "resume=latest goes on from there" if step else "nothing to save yet"
            logger.info("%s: stopped after step %d%s; %s", termination, step, during, advice)
        log.close()
        return finished

    def save(self, step: int) -> None:
        """Save a checkpoint of `step`. All ranks call it."""
        save_checkpoint(self.engine, self.inputs.tokenizer, self.config, self._marker(step))

    def _marker(self, step: int) -> Marker:
        return Marker(step, self.world_size, self.start.run)

    def evaluate(self, step: int, termination: Termination) -> dict[str, float]:
        """Evaluate the draft, and save it if it is the best. {} after a request to stop: it is then due on resume."""
        metrics = self.evaluation.run(termination)
        self.evaluation_due = not metrics
        acceptance_length = metrics.get("eval_acceptance_length", -math.inf)
        if self.config.evaluation.keep_best and acceptance_length > self.best_acceptance_length:
            self.best_acceptance_length = acceptance_length
            save_best(self.engine.module, self.inputs.tokenizer, self.config, metrics, self._marker(step))
        return metrics
