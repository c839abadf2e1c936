"""A training run, from its command-line arguments to the last checkpoint."""

import logging
import math
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from longspec.errors import os_errors, reports_user_errors
from longspec.locks import locked
from longspec.models.target_cache import resolve_target
from longspec.ranks.agreement import Termination, check_shared, from_rank_zero, launched_ranks
from longspec.ranks.peers import watched
from longspec.signals import exit_code
from longspec.train.checkpoint import locate, saved_draft
from longspec.train.config import load_config
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import rank_zero_first, share_targets, start_ranks
from longspec.train.engine import build_engine, build_pair
from longspec.train.evaluation import evaluates_after, held_out_row_count
from longspec.train.generations import DRAFTS, METRICS_NAME, holds_run
from longspec.train.inputs import fresh_vocabulary, read_inputs, read_pair
from longspec.train.logging import logged_metrics, setup_logging
from longspec.train.recipe import FEW_STEPS
from longspec.train.resume import last_step, rows_per_step, where_to_start, with_draft_options
from longspec.train.shards import Shards, adopt
from longspec.train.trainer import Trainer

logger = logging.getLogger(__name__)


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Train as the command line says. Bad input is reported in one line on stderr with exit code 2.

    A signal to any rank, or the end of the launcher, stops all ranks (see docs/train.md). The exit code is then 128 +
    the signal's number.
    """
    # Before anything else that may log.
    setup_logging(launched_ranks()[0])
    with Termination(at_once=True) as termination:
        with watched(termination) as watch:
            start_ranks()
            watch.connect()
            # Read once: files could differ between hosts.
            config = from_rank_zero(lambda: load_config(sys.argv[1:] if argv is None else argv))
            finished = config is None or train(config, termination)
        dist.destroy_process_group()
        if not finished:
            raise SystemExit(exit_code(termination.received or signal.SIGTERM))


def train(config: TrainConfig, termination: Termination) -> bool:
    """Run the whole training on this rank. Returns False if it was stopped before its last step."""
    share_targets(config.tp_size)
    output = Path(config.output_dir)
    with ExitStack() as stack:
        # All ranks end with one error line if another run holds the lock, or if hosts see different folders.
        from_rank_zero(lambda: stack.enter_context(locked(output)))
        check_shared(output, "output_dir: ")
        return _train_locked(from_rank_zero(lambda: locate(config)), termination)


def _train_locked(config: TrainConfig, termination: Termination) -> bool:
    """`train`, once the output folder is locked."""
    # Checkpoints name the target as the user did. The folder of a converted target exists on this machine only.
    # Rank 0 downloads or converts it, and the others find the result in the cache.
    target = rank_zero_first(lambda: resolve_target(config.model_name_or_path))
    start = from_rank_zero(lambda: where_to_start(config, target))
    # A resumed run has its own draft; the draft of the previous stage may be gone.
    draft = None if start.state else start.draft or config.draft_model_name_or_path
    run_config = from_rank_zero(lambda: with_draft_options(config, start.state, draft))
    local_config = replace(run_config, model_name_or_path=target, draft_model_name_or_path=draft)

    # Data and draft are checked before the target's weights are loaded, which takes minutes.
    inputs = rank_zero_first(lambda: read_inputs(local_config))
    total_steps = from_rank_zero(lambda: last_step(run_config, len(inputs.rows), start.step))
    held_out_rows = from_rank_zero(lambda: held_out_row_count(run_config, inputs))
    lacks_one = from_rank_zero(lambda: lacks_evaluation(run_config, start.step, total_steps))
    evaluation_due = bool(held_out_rows) and lacks_one
    if start.step == total_steps and not evaluation_due:
        logger.info("nothing left to do: %s already holds step %d, the last one", run_config.output_dir, total_steps)
        log_next_command(run_config)
        return True
    rows, per_step = len(inputs.rows), rows_per_step(run_config)
    logger.info("%d rows, %d per step; steps %d … %d", rows, per_step, start.step + 1, total_steps)
    logger.info("target %s, draft %s", run_config.model_name_or_path, start.state or draft or "fresh")
    if draft is None:
        warn_of_few_steps(total_steps, run_config.max_steps)

    # A resumed run builds its draft from the saved master weights, otherwise from the previous stage.
    draft_weights = saved_draft(start.state) if start.state else inputs.draft
    vocabulary = None
    if draft_weights is None:
        vocabulary = from_rank_zero(lambda: fresh_vocabulary(local_config, inputs))
    engine = build_engine(run_config, build_pair(local_config, draft_weights, vocabulary))
    if start.state:
        adopt(engine, Shards(start.state))

    trainer = Trainer(run_config, engine, inputs, total_steps, start, held_out_rows, evaluation_due)
    if finished := trainer.run(termination):
        log_next_command(run_config)
    return finished


def check_start(config: TrainConfig) -> None:
    """Check target and draft of a run that is not launched, without the target's weights. A target that is not on this
    machine is left to the launch, which fetches it. Raises UserError."""
    if Path(config.model_name_or_path).exists():
        config = locate(config)
    if not Path(config.model_name_or_path).exists():
        return
    output = Path(config.output_dir)
    is_resumed = config.resume is not None and holds_run(output)
    draft = None if is_resumed else config.draft_model_name_or_path
    config = with_draft_options(config, None, draft)
    target = resolve_target(config.model_name_or_path)
    read_pair(replace(config, model_name_or_path=target, draft_model_name_or_path=draft))


def lacks_evaluation(config: TrainConfig, step: int, total_steps: int) -> bool:
    """Whether a request to stop interrupted the evaluation after `step`."""
    if step == 0 or not evaluates_after(step, config, total_steps):
        return False
    path = Path(config.output_dir) / METRICS_NAME
    with os_errors(f"{path}: cannot be read"):
        metrics = logged_metrics(path, step)
    return not any("eval_acceptance_length" in line for line in metrics if line["step"] == step)


def warn_of_few_steps(steps: int, max_steps: int | None) -> None:
    """Log a warning if a fresh draft trains for so few steps that it is rarely of use."""
    if steps < FEW_STEPS:
        logger.warning(
            "%d steps are few: a fresh draft with less than %d is rarely faster than prompt lookup; %s",
            steps,
            FEW_STEPS,
            "raise max_steps" if max_steps else f"train on about {math.ceil(FEW_STEPS / steps)} times as much data",
        )


def log_next_command(config: TrainConfig) -> None:
    """Log where the draft is and the command that compares it with the other methods."""
    folder = Path(config.output_dir) / DRAFTS[1]
    command = ["longspec", "bench", config.model_name_or_path, "--draft", str(folder)]
    logger.info("the draft is in %s; compare it with the other methods: %s", folder, shlex.join(command))
