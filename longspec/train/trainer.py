"""The loop over the optimizer steps of a run."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspec.data.collators import IGNORED
from longspec.kernels.training.segments import Segments
from longspec.ranks.agreement import Termination, from_every_rank, from_rank_zero
from longspec.train.checkpoint import read_best, save_best, save_checkpoint
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import data_parallel_rank_and_size, rank_zero_first, summed, summed_by_name
from longspec.train.engine import cosine_with_warmup, set_learning_rate
from longspec.train.evaluation import Evaluation
from longspec.train.inputs import Inputs
from longspec.train.logging import RunLog
from longspec.train.loss import DraftLoss, stop_at_broken_loss
from longspec.train.micro_batches import (
    Arrays,
    Batch,
    EngineInputs,
    StepBatches,
    batch_positions,
    engine_inputs,
    take_micro_batches,
)
from longspec.train.positions import micro_step_generator, random_lags
from longspec.train.resume import rows_per_step
from longspec.train.sampler import ResumableSampler, loader
from longspec.train.seals import Progress, Run

logger = logging.getLogger(__name__)
FINISH_S = 10
"""Seconds that the current step may take after a request to stop. Launchers kill a rank after 30 s, and saving takes
time, too."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step."""

    metrics: dict[str, float]
    next_batches: StepBatches | None
    """Data of the next step, loaded during this one; None after the last step."""


class Trainer:
    """The loop over optimizer steps. Every rank has one and takes every step; only rank 0 logs."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Any,
        inputs: Inputs,
        *,
        start_step: int,
        total_steps: int,
        held_out_rows: int = 0,
        evaluation_due: bool = False,
        run: Run | None = None,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """Prepare steps `start_step` + 1 … `total_steps`.

        held_out_rows: number of rows per evaluation. evaluation_due: whether a request to stop interrupted the
        evaluation after `start_step`. run: the run that the checkpoints belong to. before_save: called on all ranks
        before each save (see `sole_writer`).
        """
        self.config = config
        self.engine = engine
        self.inputs = inputs
        self.start_step = start_step
        self.total_steps = total_steps
        self.run_identity = run
        self.before_save = before_save or (lambda: None)
        self.evaluation_due = evaluation_due
        """Whether the last step's evaluation was interrupted."""
        self.best_acceptance_length = -math.inf
        """Held-out acceptance length of the draft in `checkpoint-best`."""

        self.accumulation = config.gradient_accumulation_steps
        self.learning_rate_factor = cosine_with_warmup(total_steps, config.warmup_ratio)
        self.objective = DraftLoss(config.loss, config.log_target_loss)
        self.evaluation: Evaluation | None = None
        if held_out_rows:
            self.evaluation = Evaluation(config, engine, inputs, self.objective, held_out_rows)

        self.rank, self.world_size = data_parallel_rank_and_size()
        self.sampler = ResumableSampler(
            rows=len(inputs.rows),
            batch_size=config.per_device_train_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=config.seed,
            start=start_step * self.accumulation,
            stop=total_steps * self.accumulation,
        )
        self.loader = loader(inputs.rows, inputs.collate, self.sampler, config.data.num_workers, self.accumulation)

    def run(self, termination: Termination) -> bool:
        """Train up to the last step, evaluate and save on the way, and save the last step.

        Returns False if a request to stop came before the end of the last step and its evaluation. The last finished
        step is saved in that case, too.
        """
        self.engine.train()
        # Iterating starts the loading processes. They load while rank 0 opens the log.
        arrays = iter(self.loader)
        self.best_acceptance_length = from_rank_zero(self._saved_best)
        log = rank_zero_first(lambda: RunLog(self.config, dist.get_rank(), self.start_step, self.total_steps))

        # Up to this barrier a signal ends all ranks immediately. From here on they stop together after a step.
        from_every_rank(None)
        termination.at_once = False

        self.repeat_evaluation(log, termination)
        step = self.start_step
        batches = self.load_step(step + 1, arrays) if step < self.total_steps else None
        while batches is not None:
            start = time.perf_counter()
            is_last = step + 1 == self.total_steps
            result = self.train_step(step + 1, batches, termination, None if is_last else arrays)
            if result is None:
                break
            step += 1
            batches = result.next_batches
            metrics = {"step": step, **result.metrics, "seconds": time.perf_counter() - start}
            metrics["data_seconds"] = batches.wait_s if batches else 0.0
            log.step({**metrics, **self.evaluate(step, termination)})
            if step % self.config.save_steps == 0 or step == self.total_steps:
                self.save(step)

        finished = step == self.total_steps and not self.evaluation_due
        if not finished:
            self._save_stopped(step, termination)
        log.close()
        return finished

    def _saved_best(self) -> float:
        """Acceptance length of the best draft so far, -inf if there is none that this run continues from."""
        continues = self.start_step and self.config.evaluation.keep_best
        return read_best(self.config, self.run_identity) if continues else -math.inf

    def _save_stopped(self, step: int, termination: Termination) -> None:
        """Save `step`, the last finished one, unless it is saved already, and log where the run stopped."""
        if self.start_step < step < self.total_steps and step % self.config.save_steps:
            self.save(step)
        during = ", in its evaluation" if self.evaluation_due else ""
        advice = "resume=latest goes on from there" if step else "nothing to save yet"
        logger.info("%s: stopped after step %d%s; %s", termination, step, during, advice)

    def save(self, step: int) -> None:
        """Save a checkpoint of `step`. All ranks call it."""
        self.before_save()
        # With an evaluation due, a resumed run repeats it before the next step.
        progress = Progress(step, self.world_size, self.evaluation_due)
        save_checkpoint(
            self.engine, self.inputs.tokenizer, self.config, progress, self.config.output_dir, self.run_identity
        )

    def repeat_evaluation(self, log: RunLog, termination: Termination) -> None:
        """Run the evaluation of the checkpoint that training resumes from, if it was interrupted."""
        if not self.evaluation_due:
            return
        metrics = self.run_evaluation(self.start_step, termination)
        if metrics:
            log.repeat({"step": self.start_step, **metrics})
            if self.start_step == self.total_steps:
                self.save(self.start_step)

    def evaluate(self, step: int, termination: Termination) -> dict[str, float]:
        """The held-out metrics after `step`; {} if no evaluation is due there or a request to stop interrupted it."""
        if self.evaluation is None or (step % self.config.evaluation.steps and step != self.total_steps):
            return {}
        return self.run_evaluation(step, termination)

    def run_evaluation(self, step: int, termination: Termination) -> dict[str, float]:
        """Evaluate the draft after `step`, and save it if it is the best one and `keep_best` is set.

        Returns {} after a request to stop. The evaluation is then due on resume.
        """
        assert self.evaluation is not None
        metrics = self.evaluation.run(termination)
        self.evaluation_due = not metrics
        if self.config.evaluation.keep_best and metrics:
            acceptance_length = metrics["eval_acceptance_length"]
            if acceptance_length > self.best_acceptance_length:
                self.best_acceptance_length = acceptance_length
                self._save_best(step, metrics)
        return metrics

    def _save_best(self, step: int, metrics: dict[str, float]) -> None:
        self.before_save()
        progress = Progress(step, self.world_size)
        save_best(self.engine.module, self.inputs.tokenizer, self.config, progress, metrics, self.run_identity)

    def load_step(self, step: int, arrays: Arrays) -> StepBatches:
        """Load the micro-batches of `step` and prepare the inputs of the first one."""
        micro_batches, wait_s = take_micro_batches(arrays, self.accumulation)
        first_inputs = self.micro_batch_inputs((step - 1) * self.accumulation, micro_batches[0])
        return StepBatches(micro_batches, first_inputs, wait_s)

    def train_step(
        self, step: int, batches: StepBatches, termination: Termination, arrays: Arrays | None = None
    ) -> StepResult | None:
        """Take one optimizer step. Returns None if a request to stop came before its end.

        arrays: the loader's iterator, from which the data of the next step is taken; None if there is no next step.

        The gradient is that of the mean loss over the tokens of all ranks and micro-batches, however unevenly they are
        distributed. Raises UserError if the loss or the gradient is NaN or infinite.
        """
        tokens = self.count_tokens(batches.micro_batches)
        # DeepSpeed divides the gradient by the accumulation steps and averages it over ranks. This undoes both.
        loss_scale = self.world_size * self.accumulation / tokens
        learning_rate = self.config.learning_rate * self.learning_rate_factor(step - 1)
        set_learning_rate(self.engine, learning_rate)

        outcome = self.run_micro_batches(step, batches, loss_scale, termination, arrays)
        if outcome is None:
            return None
        terms, next_batches = outcome

        means = summed_by_name(terms, divisor=tokens)
        grad_norm = self.gradient_norm()
        self.check_finite(step, terms, means["loss"], grad_norm)
        epoch = step * rows_per_step(self.config) / len(self.inputs.rows)
        metrics = {**means, "lr": learning_rate, "grad_norm": grad_norm, "tokens": tokens, "epoch": epoch}
        return StepResult(metrics, next_batches)

    def run_micro_batches(
        self, step: int, batches: StepBatches, loss_scale: float, termination: Termination, arrays: Arrays | None
    ) -> tuple[list[dict[str, Tensor]], StepBatches | None] | None:
        """Forward and backward of each micro-batch; the engine updates the draft after the last one.

        Returns the terms of each micro-batch's loss and the data of the next step; None after a request to stop.
        """
        terms: list[dict[str, Tensor]] = []
        inputs: EngineInputs | None = batches.first_inputs
        next_batches: StepBatches | None = None
        for index in range(len(batches.micro_batches)):
            # An unfinished step is dropped, and the resumed run repeats it. Before the first micro-batch nothing is
            # lost; after it the step is worth finishing if that does not take long.
            if termination.agreed(FINISH_S if index else 0):
                return None
            assert inputs is not None
            micro_step = (step - 1) * self.accumulation + index
            loss, micro_batch_terms = self.forward(micro_step, inputs)
            self.engine.backward(loss * loss_scale)
            terms.append(micro_batch_terms)

            # The device is still busy, so preparing the next micro-batch here costs no time. Its target pass does not
            # depend on the draft's weights and can run in parallel to the optimizer step.
            inputs = None
            if index + 1 < len(batches.micro_batches):
                inputs = self.micro_batch_inputs(micro_step + 1, batches.micro_batches[index + 1])
            elif arrays is not None:
                next_batches = self.load_step(step + 1, arrays)
                inputs = next_batches.first_inputs
            if inputs is not None:
                self.start_target_pass(inputs)

            # DeepSpeed counts the calls: only the last one of a step changes the weights.
            self.engine.step()
        return terms, next_batches

    def count_tokens(self, micro_batches: list[Batch]) -> int:
        """The number of tokens in the loss of a step, over all ranks, at least 1."""
        count = sum(int((batch["labels"] != IGNORED).sum()) for batch in micro_batches)
        return max(1, int(summed(torch.tensor(count, device=self.engine.device))))

    def micro_batch_inputs(self, micro_step: int, batch: Batch) -> EngineInputs:
        """The engine's inputs for a micro-batch, with positions and lags drawn for `micro_step` and this rank."""
        variant = self.config.variant
        generator = micro_step_generator(self.config.seed, micro_step, self.rank)
        positions = batch_positions(batch, variant, self.inputs.max_positions, generator)
        lags = None
        if variant.name != "base":
            lags = random_lags(len(batch["cu_seqlens"]) - 1, variant.depth, generator)
        return engine_inputs(batch, positions, lags, self.objective, self.engine.device)

    def forward(self, micro_step: int, inputs: EngineInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of a micro-batch and its terms.

        Torch's generators are seeded by `micro_step`, so random operations do not depend on the steps before.
        """
        torch.manual_seed(micro_step_generator(self.config.seed, micro_step, self.rank).initial_seed())
        return self.engine(**inputs)

    def start_target_pass(self, inputs: EngineInputs) -> None:
        """Start the target's pass over the next micro-batch, if the target runs as a CUDA graph.

        The graph of a small target runs in parallel to the optimizer, which uses only part of the device.
        """
        target_pass = self.engine.module.target_pass
        if target_pass is None:
            return
        segments = Segments(inputs["cu_seqlens"].tolist(), self.engine.device)
        whole = self.engine.module.needs_whole_pass(self.objective)
        target_pass.begin(inputs["input_ids"], inputs["position_ids"], segments, whole)

    def gradient_norm(self) -> float:
        """The gradient norm of the last step before clipping; NaN if DeepSpeed has none."""
        norm = self.engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    def check_finite(self, step: int, terms: list[dict[str, Tensor]], loss: float, grad_norm: float) -> None:
        """Raise UserError on all ranks, with the ids of the samples, if the loss or the gradient is not finite."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        losses = [micro_batch_terms["loss"] for micro_batch_terms in terms]
        stop_at_broken_loss(step, loss, grad_norm, losses, self.sample_ids(step))

    def sample_ids(self, step: int) -> list[list[str]]:
        """The ids of this rank's samples in `step`, one list per micro-batch."""
        micro_steps = range((step - 1) * self.accumulation, step * self.accumulation)
        return [
            [sample for row in self.sampler.batch(micro_step) for sample in self.inputs.rows.ids(row)]
            for micro_step in micro_steps
        ]
