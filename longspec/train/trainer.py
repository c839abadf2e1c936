"""A training run, from the launch line to the last checkpoint."""

import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longspec.data.collators import IGNORED
from longspec.errors import reports_user_errors
from longspec.kernels.shared.device import upload
from longspec.kernels.training.segments import Segments
from longspec.models.target_cache import resolve_target
from longspec.signals import exit_code
from longspec.train.checkpoint import load_state, locate, read_best, save_best, save_checkpoint, saved_draft
from longspec.train.config import TrainConfig, load_config
from longspec.train.distributed import (
    Termination,
    data_parallel_place,
    from_every_rank,
    from_rank_zero,
    launched_rank,
    rank_zero_first,
    share_targets,
    start_ranks,
    summed,
)
from longspec.train.engine import build_engine, build_pair, cosine_with_warmup, set_learning_rate
from longspec.train.evaluation import Evaluation, rows_held_out
from longspec.train.folder_lock import sole_writer
from longspec.train.inputs import Inputs, read_inputs
from longspec.train.logging import RunLog, setup_logging
from longspec.train.loss import Objective, stop_at_broken_loss
from longspec.train.peers import watched
from longspec.train.positions import micro_step_generator, random_lags, variant_positions
from longspec.train.resume import last_step, rows_a_step, where_to_start, with_draft_options
from longspec.train.sampler import ResumableSampler, loader
from longspec.train.seals import Progress, Run

logger = logging.getLogger(__name__)
FINISH_S = 10
"""Seconds that a step may go on once a stop is asked for; launchers kill a rank after 30 s, and it has to save, too."""
Batch = dict[str, Tensor]
Arrays = Iterator[dict[str, np.ndarray]]


@reports_user_errors
def main(argv: Sequence[str] | None = None, before_steps: Callable[[], None] | None = None) -> None:
    """Run the launch line's arguments. Bad input is one line on stderr and exit code 2.

    SIGTERM, SIGINT and SIGHUP to any rank, and the end of the launcher (see `longspec.train.peers`), stop all ranks:
    the step at hand is finished if that takes no more than FINISH_S seconds, the last finished step is saved, and the
    exit code is 128 + the signal's number. A signal to DeepSpeed's own processes gives their exit codes: `deepspeed`
    dies of the signal (128 + n in shells); with `launch.py` stopped by SIGTERM or SIGINT it returns 1, by another
    signal 0.

    before_steps: called when all is loaded and the first step is to be taken.
    """
    setup_logging(launched_rank())
    with Termination(at_once=True) as termination:
        with watched(termination) as watch:
            start_ranks()
            watch.connect()
            config = from_rank_zero(lambda: load_config(sys.argv[1:] if argv is None else argv))
            finished = config is None or train(config, termination, before_steps)
        dist.destroy_process_group()
        if not finished:
            raise SystemExit(exit_code(termination.received or signal.SIGTERM))


def train(asked: TrainConfig, termination: Termination, before_steps: Callable[[], None] | None = None) -> bool:
    """The whole run on this rank; False if it was stopped before its last step."""
    share_targets(asked.tp_size)
    config = from_rank_zero(lambda: locate(asked))
    with sole_writer(Path(config.output_dir)) as before_save:
        return _train(config, termination, before_save, before_steps)


def _train(
    config: TrainConfig,
    termination: Termination,
    before_save: Callable[[], None],
    before_steps: Callable[[], None] | None,
) -> bool:
    """The run, once its output folder is locked; False if it was stopped before its last step."""
    # Checkpoints name the target as the user did: the folder of a converted one is this machine's.
    target = rank_zero_first(lambda: resolve_target(config.model_name_or_path))
    begin = from_rank_zero(lambda: where_to_start(config, target))
    # A resumed run has its draft: that of the stage before may be gone.
    draft = None if begin.state else begin.draft or config.draft_model_name_or_path
    asked = config
    config = from_rank_zero(lambda: with_draft_options(asked, begin.state, draft))
    local = replace(config, model_name_or_path=target, draft_model_name_or_path=draft)
    inputs = rank_zero_first(lambda: read_inputs(local))
    start = begin.progress.step
    total = from_rank_zero(lambda: last_step(config, len(inputs.rows), start))
    held_out = from_rank_zero(lambda: rows_held_out(config, inputs))
    evaluation_due = begin.progress.evaluation_due and held_out > 0
    if start == total and not evaluation_due:
        logger.info("nothing left to do: %s already holds step %d, the last one", config.output_dir, total)
        return True
    logger.info(
        "%d rows, %d a step; steps %d … %d; target %s, draft %s",
        *(len(inputs.rows), rows_a_step(config), start + 1, total, config.model_name_or_path),
        begin.state or draft or "fresh",
    )
    engine = build_engine(config, build_pair(local, saved_draft(begin.state) if begin.state else inputs.draft))
    if begin.state:
        load_state(engine, begin.state, begin.progress)
    trainer = Trainer(config, engine, inputs, start, total, held_out, begin.run, before_save)
    trainer.evaluation_due = evaluation_due
    if before_steps:
        before_steps()
    return trainer.run(termination)


class Trainer:
    """The loop over optimizer steps. Every rank has one; rank 0's also logs. Ranks that share a target do the same."""

    def __init__(
        self,
        config: TrainConfig,
        engine: Any,
        inputs: Inputs,
        start: int,
        total: int,
        held_out: int,
        origin: Run | None = None,
        before_save: Callable[[], None] | None = None,
    ) -> None:
        """Steps `start` + 1 … `total`; `held_out` rows are evaluated on the way.

        origin: the run that its checkpoints belong to; before_save: see `sole_writer`.
        """
        self.config, self.engine, self.inputs, self.origin = config, engine, inputs, origin
        self.before_save = before_save or (lambda: None)
        self.start, self.total = start, total
        self.schedule = cosine_with_warmup(total, config.warmup_ratio)
        self.objective = Objective(config.loss, config.log_target_loss)
        self.evaluation = Evaluation(config, engine, inputs, self.objective, held_out) if held_out else None
        self.accumulation = config.gradient_accumulation_steps
        self.rank, self.ranks = data_parallel_place()
        self.evaluation_due = False
        """Whether the last step's evaluation was interrupted."""
        self.upcoming: list[Batch] = []
        self.begun: tuple[Batch, dict[str, Any]] | None = None
        """The micro-batch whose target pass may have begun, and what the engine is given of it."""
        self.sampler = ResumableSampler(
            rows=len(inputs.rows),
            batch_size=config.per_device_train_batch_size,
            rank=self.rank,
            world_size=self.ranks,
            seed=config.seed,
            start=start * self.accumulation,
            stop=total * self.accumulation,
        )
        self.loader = loader(inputs.rows, inputs.collate, self.sampler, config.data.num_workers, self.accumulation)

    def run(self, termination: Termination) -> bool:
        """Train up to the last step and save there, whatever `save_steps` says.

        Returns False if `termination` stopped it before its last step or that step's evaluation was finished; the last
        finished step is then saved.
        """
        self.engine.train()
        batches = iter(self.loader)
        remembers = self.start and self.config.evaluation.keep_best
        self.best = from_rank_zero(lambda: read_best(self.config, self.origin) if remembers else -math.inf)
        log = rank_zero_first(lambda: RunLog(self.config, dist.get_rank(), self.start, self.total))
        done = self.start
        from_every_rank(None)  # until here a signal ends all ranks at once
        termination.at_once = False
        self.repeat_evaluation(log, termination)
        self.upcoming = self.window(batches if self.start < self.total else None)
        for step in range(self.start + 1, self.total + 1):
            began = time.perf_counter()
            metrics = self.train_step(step, self.upcoming, termination, batches if step < self.total else None)
            if metrics is None:
                break
            done = step
            metrics |= {"seconds": time.perf_counter() - began, "data_seconds": self.data_seconds}
            log.step({"step": step, **metrics, **self.evaluate(step, termination)})
            if step % self.config.save_steps == 0 or step == self.total:
                self.save(step)
        finished = done == self.total and not self.evaluation_due
        if not finished:
            if self.start < done < self.total and done % self.config.save_steps:
                self.save(done)
            where = ", in its evaluation" if self.evaluation_due else ""
            goes_on = "resume=latest goes on from there" if done else "nothing to save yet"
            logger.info("%s: stopped after step %d%s; %s", termination, done, where, goes_on)
        log.close()
        return finished

    def window(self, batches: Arrays | None) -> list[Batch]:
        """The next step's micro-batches, where there is a next step; `data_seconds` is how long they took."""
        began = time.perf_counter()
        arrays = [next(batches) for _ in range(self.accumulation)] if batches else []
        self.data_seconds = time.perf_counter() - began
        return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in arrays]

    def save(self, step: int) -> None:
        self.before_save()
        progress = Progress(step, self.ranks, self.evaluation_due)
        config = self.config
        save_checkpoint(self.engine, self.inputs.tokenizer, config, progress, config.output_dir, self.origin)

    def repeat_evaluation(self, log: RunLog, termination: Termination) -> None:
        """Run the evaluation of the checkpoint that training resumes from, if SIGTERM interrupted it."""
        if self.evaluation_due and (found := self.run_evaluation(self.start, termination)):
            log.repeat({"step": self.start, **found})
            if self.start == self.total:
                self.save(self.start)

    def evaluate(self, step: int, termination: Termination) -> dict[str, float]:
        """The held-out metrics after `step`, {} where none are due; the best draft is kept where that is asked."""
        wanted = self.config.evaluation
        if self.evaluation is None or (step % wanted.steps and step != self.total):
            return {}
        return self.run_evaluation(step, termination)

    def run_evaluation(self, step: int, termination: Termination) -> dict[str, float]:
        """The held-out metrics after `step`; {} if SIGTERM came first, and then the evaluation is due on resume."""
        assert self.evaluation is not None
        found = self.evaluation.run(termination)
        self.evaluation_due = not found
        if self.config.evaluation.keep_best and found and found["eval_acceptance_length"] > self.best:
            self.best = found["eval_acceptance_length"]
            self.before_save()
            progress = Progress(step, self.ranks)
            save_best(self.engine.module, self.inputs.tokenizer, self.config, progress, found, self.origin)
        return found

    def train_step(
        self, step: int, window: list[Batch], termination: Termination, batches: Arrays | None = None
    ) -> dict[str, float] | None:
        """One optimizer step over the accumulation window's micro-batches; None if it was stopped before its end.

        While the device has the last of them to do, the next step's window is taken from `batches`, into `upcoming`.
        DeepSpeed divides by accumulation steps and averages over ranks. Each summed loss is scaled so that the result
        is the mean over the tokens of all ranks and micro-batches, however unevenly they lie. Raises UserError for a
        loss or gradient that is not finite.
        """
        counts = torch.tensor([int((batch["labels"] != IGNORED).sum()) for batch in window], device=self.engine.device)
        tokens = max(1, int(summed(counts.sum())))
        scale = self.ranks * self.accumulation / tokens
        terms: list[dict[str, Tensor]] = []
        set_learning_rate(self.engine, rate := self.config.learning_rate * self.schedule(step - 1))
        for number, batch in enumerate(window, 1):
            if termination.agreed(0 if number == 1 else FINISH_S):
                return None  # an unfinished window is forgotten: the resumed run takes the step again
            micro_step = (step - 1) * self.accumulation + number
            loss, found = self.forward(micro_step - 1, batch)
            self.engine.backward(loss * scale)
            if number == len(window):
                self.upcoming = self.window(batches)
            if coming := window[number:] or self.upcoming:
                self.begin(micro_step, coming[0])
            self.engine.step()
            terms.append(found)
        sums = {name: torch.stack([found[name] for found in terms]).sum() for name in terms[0]}
        means = dict(zip(sums, (summed(torch.stack(list(sums.values()))) / tokens).tolist(), strict=True))
        norm = math.nan if (measured := self.engine.get_global_grad_norm()) is None else float(measured)
        if not (math.isfinite(means["loss"]) and math.isfinite(norm)):
            rows = map(self.sampler.batch, range((step - 1) * self.accumulation, step * self.accumulation))
            samples = [[name for row in batch for name in self.inputs.rows.ids(row)] for batch in rows]
            stop_at_broken_loss(step, means["loss"], norm, [found["loss"] for found in terms], samples)
        epoch = step * rows_a_step(self.config) / len(self.inputs.rows)
        return {**means, "lr": rate, "grad_norm": norm, "tokens": tokens, "epoch": epoch}

    def begin(self, micro_step: int, batch: Batch) -> None:
        """Let a small target go on to the next micro-batch beside the optimizer, which keeps the device half busy."""
        given = self.given(micro_step, batch)
        self.begun = batch, given
        if passes := self.engine.module.target_pass:
            segments = Segments(given["cu_seqlens"].tolist(), self.engine.device)
            whole = self.engine.module.needs_whole_pass(self.objective)
            passes.begin(given["input_ids"], given["position_ids"], segments, whole)

    def forward(self, micro_step: int, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective on one micro-batch; what is random in it does not depend on the past."""
        torch.manual_seed(micro_step_generator(self.config.seed, micro_step, self.rank).initial_seed())
        begun, given = self.begun or ({}, {})
        return self.engine(**(given if begun is batch else self.given(micro_step, batch)))

    def given(self, micro_step: int, batch: Batch) -> dict[str, Any]:
        """What the engine is given of a micro-batch, with positions and lags drawn for it."""
        generator = micro_step_generator(self.config.seed, micro_step, self.rank)
        shape = (batch["input_ids"].shape[0], batch["input_ids"].shape[1])
        segments, variant, window = batch["cu_seqlens"], self.config.variant, self.inputs.window
        positions = variant_positions(variant.name, segments, shape, variant.max_offset, window, generator)
        lags = None if variant.name == "base" else random_lags(len(segments) - 1, variant.depth, generator)
        ids, positions = (upload(x, self.engine.device) for x in (batch["input_ids"], positions))
        # All else is read on the host: a copy back from the device would wait for it.
        on_host = {"labels": batch["labels"], "cu_seqlens": segments, "lags": lags, "objective": self.objective}
        return {"input_ids": ids, "position_ids": positions, **on_host}
