"""Evaluation of the current draft on held-out rows. It changes nothing that training reads afterwards.

The target reads each row once, and the draft predicts it at every lag that training covers, with the position ids of
training. Only answers count, and all of a text without a prompt. The row number seeds the position offsets, so
evaluations at different steps are comparable. In a chain of depth D from root position n, depth d is correct if the
query at n + d - 1, lagging by d, ranks the text's token at n + d first.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.ranks.agreement import Termination
from longspec.train.config_schema import TrainConfig
from longspec.train.distributed import data_parallel_rank_and_size, summed_by_name
from longspec.train.inputs import Inputs
from longspec.train.loss import DraftLoss
from longspec.train.micro_batches import batch_positions, engine_inputs
from longspec.train.positions import micro_step_generator


def held_out_row_count(config: TrainConfig, inputs: Inputs) -> int:
    """The rows of an evaluation, 0 without held-out data. Raises UserError if they are too short for a single chain."""
    if inputs.held_out is None:
        return 0
    count = min(len(inputs.held_out), config.evaluation.rows or len(inputs.held_out))
    depth = config.variant.largest_lag
    for row in range(count):
        if chain_roots(inputs.collate_held_out([inputs.held_out[row]])["labels"], depth).any():
            return count
    raise UserError(
        f"config key evaluation.files: none of the first {count} rows has {depth + 1} consecutive tokens in the loss, "
        "which a chain needs; give longer samples or more rows"
    )


def evaluates_after(step: int, config: TrainConfig, total_steps: int) -> bool:
    """Whether an evaluation follows `step`. The last step has one even if `evaluation.steps` does not divide it."""
    return step % config.evaluation.steps == 0 or step == total_steps


def chain_roots(labels: Tensor, depth: int) -> Tensor:
    """Where a chain can start, bool [B, T - depth]: `depth` more tokens follow in the loss and in the same segment."""
    if labels.shape[1] <= depth:
        return labels.new_zeros(len(labels), 0, dtype=torch.bool)
    # The first token of a segment is never in the loss, so no run of labels crosses a border.
    return (labels != IGNORED).unfold(1, depth + 1, 1).all(-1)


def correct_depths(hits: Tensor, labels: Tensor) -> Tensor:
    """The number of leading depths that each chain predicts correctly, LongTensor [chains], each in 0 … D.

    hits: bool [D, B, T]; hits[d - 1, b, j] is true if the query that lags by d ranks the token at j first.
    labels: [B, T].
    """
    depth = len(hits)
    roots = chain_roots(labels, depth)
    # Depth d of the chain from root n is about the token at n + d.
    at_depth = [hits[d - 1, :, d : d + roots.shape[1]] for d in range(1, depth + 1)]
    return torch.stack(at_depth).long().cumprod(0).sum(0)[roots]


@dataclass(frozen=True)
class Evaluation:
    """Scores the held-out rows of a run. Every rank has one, and all ranks run theirs together."""

    config: TrainConfig
    engine: Any
    inputs: Inputs
    loss: DraftLoss
    rows: int
    """The number of rows to score, from `held_out_row_count`, > 0."""

    def run(self, termination: Termination) -> dict[str, float]:
        """Means over the held-out rows of all ranks, the same on each; {} if a request to stop came first.

        `eval_loss` and the other terms of the loss are means over tokens and lags. `eval_top1_lag_d` is the share of
        tokens that the draft ranks first when it lags by d. `eval_acceptance_length` is the mean number of tokens per
        round of a chain of the trained depth on this text: its correct leading tokens and the bonus token.
        """
        start = time.perf_counter()
        rank, world_size = data_parallel_rank_and_size()
        row_sums = []
        self.engine.eval()
        # Every rank runs the same number of rows, some of them without labels: under ZeRO-3 each forward pass is a
        # collective.
        for first_row in range(0, self.rows, world_size):
            if termination.agreed():
                break
            row_sums.append(self.score_row(first_row + rank))
        self.engine.train()
        if len(row_sums) * world_size < self.rows:
            return {}

        sums = summed_by_name(row_sums)
        tokens, chains, correct = (sums.pop(name) for name in ("tokens", "chains", "correct"))
        means = {f"eval_{name}": value / tokens for name, value in sums.items()}
        means["eval_acceptance_length"] = 1 + correct / chains
        means["eval_seconds"] = time.perf_counter() - start
        return means

    @torch.no_grad()
    def score_row(self, row: int) -> dict[str, Tensor]:
        """Sums over the tokens of one row by name, fp64 scalars; zeros for a row after the last."""
        assert self.inputs.held_out is not None
        exists = row < self.rows
        batch = self.inputs.collate_held_out([self.inputs.held_out[row if exists else 0]])
        # The forward pass still runs, but nothing of the row is counted.
        if not exists:
            batch["labels"].fill_(IGNORED)

        generator = micro_step_generator(self.config.seed, row, 0)
        positions = batch_positions(batch, self.config.variant, self.inputs.max_positions, generator)
        segments = len(batch["cu_seqlens"]) - 1
        lags = torch.arange(1, self.config.variant.largest_lag + 1)[:, None].expand(-1, segments)
        results = self.engine(**engine_inputs(batch, positions, lags, self.loss.scores, self.engine.device))
        terms_by_lag, hits = zip(*results, strict=True)

        correct = correct_depths(torch.stack(hits), batch["labels"])
        sums = {name: torch.stack([terms[name] for terms in terms_by_lag]).mean() for name in terms_by_lag[0]}
        sums |= {f"top1_lag_{lag}": lag_hits.sum() for lag, lag_hits in enumerate(hits, 1)}
        tokens, chains = (batch["labels"] != IGNORED).sum(), torch.tensor(len(correct))
        sums |= {"tokens": tokens, "chains": chains, "correct": correct.sum()}
        return {name: value.to(self.engine.device, torch.float64) for name, value in sums.items()}
