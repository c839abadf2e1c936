"""Evaluation in training: what the present draft does on held-out rows. It leaves no trace in what training does next.

A row is read once by the target and drafted at every lag that training covers, with positions as training has them;
the row's own number seeds their offsets, so that evaluations compare. A chain of depth D from root position n is right
at depth d if the query at n + d - 1, lagging by d, ranks the text's token at n + d first.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.kernels.shared.device import upload
from longspec.train.config import TrainConfig
from longspec.train.distributed import Termination, data_parallel_place, summed
from longspec.train.inputs import Inputs
from longspec.train.loss import Objective
from longspec.train.positions import BLOCK_LAGS, micro_step_generator, variant_positions


@dataclass(frozen=True)
class Scores:
    """What an objective scores instead of the loss it would minimise; see `Objective.score`."""

    objective: Objective

    @property
    def reads_target(self) -> bool:
        return self.objective.reads_target

    def __call__(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, lm_head: nn.Module
    ) -> tuple[dict[str, Tensor], Tensor]:
        return self.objective.score(hidden, target_hidden, labels, lm_head)


def trained_depth(config: TrainConfig) -> int:
    """The largest lag that training covers."""
    return BLOCK_LAGS if config.variant.name == "base" else config.variant.depth


def rows_held_out(config: TrainConfig, inputs: Inputs) -> int:
    """How many rows an evaluation reads; 0 without held-out data. UserError if not one chain fits into them."""
    if inputs.held_out is None:
        return 0
    count, depth = min(len(inputs.held_out), config.evaluation.rows or len(inputs.held_out)), trained_depth(config)
    if not any(chain_roots(inputs.collate([inputs.held_out[row]])["labels"], depth).any() for row in range(count)):
        raise UserError(
            f"config key evaluation.files: none of the first {count} rows has {depth + 1} consecutive tokens in the "
            "loss, so no chain can be drafted on them; give longer samples, or more rows"
        )
    return count


def chain_roots(labels: Tensor, depth: int) -> Tensor:
    """Where chains begin, bool [B, T - depth]: the token and the `depth` after it are one segment's and in the loss."""
    if labels.shape[1] <= depth:
        return labels.new_zeros(len(labels), 0, dtype=torch.bool)
    return (labels != IGNORED).unfold(1, depth + 1, 1).all(-1)  # a segment's first token never is


def chain_runs(hits: Tensor, labels: Tensor) -> Tensor:
    """How many of its first depths each chain has right, Long [chains], each in 0 … D.

    hits: bool [D, B, T], hits[d - 1, b, j] whether the query that lags by d ranks the token at j first; labels [B, T].
    """
    depth, roots = len(hits), chain_roots(labels, len(hits))
    at_depth = [hits[d - 1, :, d : d + roots.shape[1]] for d in range(1, depth + 1)]
    return torch.stack(at_depth).long().cumprod(0).sum(0)[roots]


class Evaluation:
    """The held-out rows of one run and how they are scored. Every rank has one, and all run theirs together."""

    def __init__(self, config: TrainConfig, engine: Any, inputs: Inputs, objective: Objective, count: int) -> None:
        """`count`: of `rows_held_out`, not 0."""
        self.config, self.engine, self.inputs, self.count = config, engine, inputs, count
        self.scores, self.depth = Scores(objective), trained_depth(config)

    def run(self, termination: Termination) -> dict[str, float]:
        """Means over the held-out rows of all ranks, the same on each; {} if SIGTERM came before the end.

        `eval_loss` and the objective's other terms are means over tokens and lags; `eval_top1_lag_d` is the share of
        tokens that the draft ranks first when it lags by d. `eval_acceptance_length` is what a chain of the trained
        depth would emit a round on this text: as many tokens as are right from its start, and the bonus token.
        """
        began = time.perf_counter()
        rank, world = data_parallel_place()
        tallies = []
        self.engine.eval()
        # As many rows on every rank, if not all of them real: under ZeRO-3 all take part in each forward pass.
        for start in range(0, self.count, world):
            if termination.agreed():
                break
            tallies.append(self.tally(start + rank))
        self.engine.train()
        if len(tallies) * world < self.count:
            return {}
        sums = {name: torch.stack([tally[name] for tally in tallies]).sum() for name in tallies[0]}
        totals = dict(zip(sums, summed(torch.stack(list(sums.values()))).tolist(), strict=True))
        tokens, chains, right = (totals.pop(name) for name in ("tokens", "chains", "right"))
        means = {f"eval_{name}": value / tokens for name, value in totals.items()}
        return means | {"eval_acceptance_length": 1 + right / chains, "eval_seconds": time.perf_counter() - began}

    @torch.no_grad()
    def tally(self, row: int) -> dict[str, Tensor]:
        """Sums over one row, fp64; 0 for a row past the last."""
        assert self.inputs.held_out is not None
        batch = self.inputs.collate([self.inputs.held_out[row if row < self.count else 0]])
        segments, variant = batch.pop("cu_seqlens"), self.config.variant
        if row >= self.count:
            batch["labels"].fill_(IGNORED)
        generator = micro_step_generator(self.config.seed, row, 0)
        shape = (1, batch["labels"].shape[1])
        positions = variant_positions(variant.name, segments, shape, variant.max_offset, self.inputs.window, generator)
        lags = torch.arange(1, self.depth + 1)[:, None].expand(-1, len(segments) - 1)
        ids, positions = (upload(x, self.engine.device) for x in (batch["input_ids"], positions))
        given = {"labels": batch["labels"], "cu_seqlens": segments, "lags": lags, "objective": self.scores}
        found = self.engine(input_ids=ids, position_ids=positions, **given)
        terms, hits = [metrics for metrics, _ in found], torch.stack([hits for _, hits in found])
        runs = chain_runs(hits, batch["labels"])
        sums = {name: torch.stack([metrics[name] for metrics in terms]).mean() for name in terms[0]}
        sums |= {f"top1_lag_{lag}": hits[lag - 1].sum() for lag in range(1, self.depth + 1)}
        sums |= {"tokens": (batch["labels"] != IGNORED).sum(), "chains": torch.tensor(len(runs)), "right": runs.sum()}
        return {name: value.to(self.engine.device, torch.float64) for name, value in sums.items()}
