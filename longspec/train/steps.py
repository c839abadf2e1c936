"""One optimizer step: its micro-batches, loss, gradient and metrics."""

import logging
import math
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from longspec.data.collators import IGNORED
from longspec.kernels.training.segments import Segments
from longspec.ranks.agreement import Termination
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import summed, summed_by_name
from longspec.train.engine import cosine_with_warmup, set_learning_rate
from longspec.train.inputs import Inputs
from longspec.train.loss import DraftLoss, stop_at_broken_loss
from longspec.train.micro_batches import Arrays, Batch, EngineInputs, training_inputs, weighted_sum
from longspec.train.positions import micro_step_generator
from longspec.train.resume import rows_per_step
from longspec.train.sampler import ResumableSampler

FINISH_S = 10
"""Seconds that the current step may take after a request to stop. Launchers kill a rank after 30 s, and saving takes
time, too."""
SLOW_STEP_S = 20
"""Seconds from which on the duration of a step is announced."""
logger = logging.getLogger(__name__)


@dataclass
class OptimizerSteps:
    """The optimizer steps of a run on this rank. All ranks take each step together."""

    config: TrainConfig
    engine: Any
    inputs: Inputs
    objective: DraftLoss
    sampler: ResumableSampler
    """The rows of this rank's micro-batches."""
    arrays: Arrays = field(init=False)
    micro_batches: list[Batch] = field(default_factory=list)
    """Data of the next step on this rank; empty after the last one."""
    first_inputs: EngineInputs | None = None
    """Inputs of the first micro-batch. They are prepared early, because its target pass may start early."""
    wait_s: float = 0.0
    """Seconds spent waiting for the loader."""

    def __post_init__(self) -> None:
        self.accumulation = self.config.gradient_accumulation_steps
        total_steps = self.sampler.stop // self.accumulation
        self.learning_rate_factor = cosine_with_warmup(total_steps, self.config.warmup_ratio)

    def start(self, step: int, arrays: Arrays) -> None:
        """Load the data of `step`. The steps take theirs from `arrays` until it ends."""
        self.arrays = arrays
        self.load(step)

    def load(self, step: int) -> None:
        """Load the micro-batches of `step`, if there are more, and prepare the inputs of the first one."""
        start = time.perf_counter()
        arrays = list(islice(self.arrays, self.accumulation))
        self.wait_s = time.perf_counter() - start
        # Shares memory with the arrays; nothing is copied.
        self.micro_batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays]
        self.first_inputs = None
        if arrays:
            self.first_inputs = self.micro_batch_inputs((step - 1) * self.accumulation, self.micro_batches[0])

    def take(self, step: int, termination: Termination) -> dict[str, float] | None:
        """Take the optimizer step whose data is loaded, and load the next one's. Returns the metrics, or None if a
        request to stop came before the end of the step.

        The gradient is that of the mean loss over the tokens of all ranks and micro-batches, however unevenly they are
        distributed. Raises UserError if the loss or the gradient is NaN or infinite.
        """
        start = time.perf_counter()
        # Tokens in the loss over all ranks, at least 1.
        count = sum(int((batch["labels"] != IGNORED).sum()) for batch in self.micro_batches)
        tokens = max(1, int(summed(torch.tensor(count, device=self.engine.device))))
        # DeepSpeed divides the gradient by the accumulation steps and averages it over ranks. This undoes both.
        # With W ranks, A micro-batches and n tokens in all: W · A / n times the sum of the loss.
        loss_scale = self.sampler.world_size * self.accumulation / tokens
        # Steps count from 1, the schedule from 0.
        learning_rate = self.config.learning_rate * self.learning_rate_factor(step - 1)
        set_learning_rate(self.engine, learning_rate)

        if (terms := self.run_micro_batches(step, loss_scale, termination)) is None:
            return None

        # Metrics are means over tokens of all ranks, not means of per-rank means.
        means = summed_by_name(terms, divisor=tokens)
        # The norm before clipping; DeepSpeed has none in some steps.
        norm = self.engine.get_global_grad_norm()
        grad_norm = math.nan if norm is None else float(norm)
        if not (math.isfinite(means["loss"]) and math.isfinite(grad_norm)):
            # The means say that the step is broken, the terms of each micro-batch in which one.
            losses = [micro_batch_terms["loss"] for micro_batch_terms in terms]
            stop_at_broken_loss(step, means["loss"], grad_norm, losses, self.sample_ids(step))
        # A fraction, because epochs end within a step.
        epoch = step * rows_per_step(self.config) / len(self.inputs.rows)
        metrics = {**means, "lr": learning_rate, "grad_norm": grad_norm, "tokens": tokens, "epoch": epoch}
        # Waiting shows that the loader is slower than training.
        return {**metrics, "seconds": time.perf_counter() - start, "data_seconds": self.wait_s}

    def run_micro_batches(
        self, step: int, loss_scale: float, termination: Termination
    ) -> list[dict[str, Tensor]] | None:
        """Forward and backward of each micro-batch, and the update. Returns the terms; None after a request to stop."""
        terms: list[dict[str, Tensor]] = []
        micro_batches, inputs = self.micro_batches, self.first_inputs
        start = time.perf_counter()
        for index in range(len(micro_batches)):
            # An unfinished step is dropped, and the resumed run repeats it. Before the first micro-batch nothing is
            # lost; after it the step is worth finishing if that does not take long.
            if termination.agreed(FINISH_S if index else 0):
                return None
            assert inputs is not None
            micro_step = (step - 1) * self.accumulation + index
            loss, micro_batch_terms = self.forward(micro_step, inputs)
            self.engine.backward(loss * loss_scale)
            terms.append(micro_batch_terms)
            step_s = (time.perf_counter() - start) * self.accumulation
            if micro_step == self.sampler.start and step_s > SLOW_STEP_S:
                logger.info("a step has %d micro-batches and takes about %.0f s", self.accumulation, step_s)

            # The device is still busy, so preparing the next micro-batch here costs no time. Its target pass does not
            # depend on the draft's weights and can run in parallel to the optimizer step.
            if index + 1 < len(micro_batches):
                inputs = self.micro_batch_inputs(micro_step + 1, micro_batches[index + 1])
            else:
                self.load(step + 1)
                inputs = self.first_inputs
            if inputs is not None:
                self.start_target_pass(inputs)

            # DeepSpeed counts the calls: only the last one of a step changes the weights.
            self.engine.step()
        return terms

    def micro_batch_inputs(self, micro_step: int, batch: Batch) -> EngineInputs:
        """The engine's inputs for a micro-batch of this rank."""
        draft, limit = self.engine.module.draft_model, self.inputs.max_positions
        objective, device, rank = self.objective, self.engine.device, self.sampler.rank
        return training_inputs(batch, self.config, limit, draft, objective, device, micro_step, rank)

    def forward(self, micro_step: int, inputs: EngineInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of a micro-batch and its terms. Seeds torch's generators, also in a resumed run."""
        torch.manual_seed(micro_step_generator(self.config.seed, micro_step, self.sampler.rank).initial_seed())
        result = self.engine(**inputs)
        return weighted_sum(result, self.engine.module.draft_model) if isinstance(result, list) else result

    def start_target_pass(self, inputs: EngineInputs) -> None:
        """Start the next target pass, if it is a CUDA graph. A small target's runs in parallel to the optimizer."""
        if (target_pass := self.engine.module.target_pass) is None:
            return
        segments = Segments(inputs["cu_seqlens"].tolist(), self.engine.device)
        target_pass.begin(inputs["input_ids"], inputs["position_ids"], segments)

    def sample_ids(self, step: int) -> list[list[str]]:
        """The ids of this rank's samples in `step`, one list per micro-batch."""
        batches = map(self.sampler.batch, range((step - 1) * self.accumulation, step * self.accumulation))
        return [[sample for row in rows for sample in self.inputs.rows.ids(row)] for rows in batches]
