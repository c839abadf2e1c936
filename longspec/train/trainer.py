"""The loop over the optimizer steps of a run."""

import logging
import math
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


class Trainer:
    """The loop over optimizer steps. Every rank has one and takes every step; only rank 0 logs."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Any,
        inputs: Inputs,
        *,
        total_steps: int,
        start: Start = FRESH,
        held_out_rows: int = 0,
        evaluation_due: bool = False,
    ) -> None:
        """Prepare the steps after `start` up to `total_steps`.

        held_out_rows: number of rows per evaluation, 0 for no evaluation. evaluation_due: whether that of the step to
        start from was interrupted.
        """
        self.config = config
        self.engine = engine
        self.inputs = inputs
        self.start_step = start.step
        self.total_steps = total_steps
        self.run_identity = start.run
        self.evaluation_due = evaluation_due
        """Whether the last step's evaluation was interrupted."""
        self.best_acceptance_length = -math.inf
        """Held-out acceptance length of the draft in `checkpoint-best`."""

        accumulation = config.gradient_accumulation_steps
        rank, self.world_size = data_parallel_rank_and_size()
        sampler = ResumableSampler(
            rows=len(inputs.rows),
            batch_size=config.per_device_train_batch_size,
            rank=rank,
            world_size=self.world_size,
            seed=config.seed,
            start=self.start_step * accumulation,
            stop=total_steps * accumulation,
        )
        self.loader = loader(inputs.rows, inputs.collate, sampler, config.data.num_workers, accumulation)

        vocabulary = engine.module.draft_model.vocabulary
        self.objective = DraftLoss(config.loss, config.log_target_loss, vocabulary=vocabulary)
        self.steps = OptimizerSteps(config, engine, inputs, self.objective, sampler, total_steps)
        self.evaluation: Evaluation | None = None
        if held_out_rows:
            self.evaluation = Evaluation(config, engine, inputs, self.objective, held_out_rows)

    def run(self, termination: Termination) -> bool:
        """Train up to the last step, evaluate and save on the way, and save the last step.

        Returns False if a request to stop came before the end of the last step and its evaluation. The last finished
        step is saved in that case, too.
        """
        self.engine.train()
        # Iterating starts the loading processes. They load while rank 0 opens the log.
        arrays = iter(self.loader)
        if self.start_step and self.config.evaluation.keep_best:
            self.best_acceptance_length = from_rank_zero(lambda: read_best(self.config, self.run_identity))
        log = rank_zero_first(lambda: RunLog(self.config, dist.get_rank(), self.start_step, self.total_steps))

        # Up to this barrier a signal ends all ranks immediately. From here on they stop together after a step.
        from_every_rank(None)
        termination.at_once = False

        step = self.start_step
        if self.evaluation_due and (evaluated := self.evaluate(step, termination)):
            log.step({"step": step, **evaluated})
        self.steps.start(step + 1, arrays)
        while self.steps.micro_batches and (metrics := self.steps.take(step + 1, termination)) is not None:
            step += 1
            if self.evaluation is not None and evaluates_after(step, self.config, self.total_steps):
                metrics |= self.evaluate(step, termination)
            log.step({"step": step, **metrics})
            if step % self.config.save_steps == 0 or step == self.total_steps:
                self.save(step)

        finished = step == self.total_steps and not self.evaluation_due
        if not finished:
            self._save_stopped(step, termination)
        log.close()
        return finished

    def _save_stopped(self, step: int, termination: Termination) -> None:
        """Save `step`, the last finished one, unless it is saved already, and log where the run stopped."""
        if self.start_step < step < self.total_steps and step % self.config.save_steps:
            self.save(step)
        during = ", in its evaluation" if self.evaluation_due else ""
        advice = "resume=latest goes on from there" if step else "nothing to save yet"
        logger.info("%s: stopped after step %d%s; %s", termination, step, during, advice)

    def save(self, step: int) -> None:
        """Save a checkpoint of `step`. All ranks call it."""
        marker = Marker(step, self.world_size, self.run_identity)
        save_checkpoint(self.engine, self.inputs.tokenizer, self.config, marker)

    def evaluate(self, step: int, termination: Termination) -> dict[str, float]:
        """Evaluate the draft after `step`, and save it if it is the best one and `keep_best` is set.

        Returns {} after a request to stop. The evaluation is then due on resume.
        """
        assert self.evaluation is not None
        metrics = self.evaluation.run(termination)
        self.evaluation_due = not metrics
        acceptance_length = metrics.get("eval_acceptance_length", -math.inf)
        if self.config.evaluation.keep_best and acceptance_length > self.best_acceptance_length:
            self.best_acceptance_length = acceptance_length
            marker = Marker(step, self.world_size, self.run_identity)
            save_best(self.engine.module, self.inputs.tokenizer, self.config, metrics, marker)
        return metrics
