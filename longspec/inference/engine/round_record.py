"""The record of a round: one tensor on the device (see `Rounds.pack`), which the host reads row by row."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspec.inference.adaptive.plans import Plan
from longspec.inference.engine.requests import MOST_ALTERNATIVES, Alternatives, Tree, round_origins
from longspec.kernels.shared.device import Download

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def read_scores(lines: list[list[float]], count: int) -> tuple[list[float], list[Alternatives]]:
    """The log-probability of each token, and the `count` most probable tokens at its place. lines: as in `scores`."""
    alternatives = []
    for line in lines:
        most = (len(line) - 1) // 2
        ids, values = line[1 : most + 1][:count], line[most + 1 :][:count]
        alternatives.append([(int(token), max(value, LEAST)) for token, value in zip(ids, values, strict=True)])
    return [max(line[0], LEAST) for line in lines], alternatives


def scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """For each of tokens [...] under logits [..., V]: fp64 [..., 1 + 2 * k], with k = MOST_ALTERNATIVES or V if less.
    The token's log-probability, then the ids of the k most probable tokens, then their log-probabilities."""
    # One tensor for all, so that the most probable token has the log-probability of its alternative, to the bit.
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = log_p.topk(min(MOST_ALTERNATIVES, log_p.shape[-1]), dim=-1)
    own = log_p.gather(-1, tokens[..., None])
    return torch.cat([own.double(), best.indices.double(), best.values.double()], -1)


class Report(NamedTuple):
    """What a record holds in addition to tokens and faults."""

    ranks: bool = False
    """The ranks of the accepted nodes and the levels of all nodes, by which plans are compared."""
    details: bool = False
    """Log-probabilities and the trace of the tree."""
    scores: bool = False
    """`round_record.scores` of the tokens."""


class RoundResult(NamedTuple):
    """A round on the device. Entries past the counts are undefined."""

    tokens: Tensor
    """LongTensor [B, depth + 1]: the accepted draft tokens, then the bonus token."""
    counts: Tensor
    """LongTensor [B]: number of valid `tokens`; 0 for inactive rows."""
    lines: Tensor
    """LongTensor [B, ...]: all that `RowRound.read` needs, for a single transfer."""
    scores: Tensor | None = None
    """fp64 [B, depth + 1, ...]: see `Report.scores`."""
    trace: Tensor | None = None
    """LongTensor [B, 2 * N + depth + 1]: the nodes' tokens and parents, and the accepted path; see `Report.details`."""


class RowRound(NamedTuple):
    """What a round did in one row."""

    tokens: Sequence[int]
    """The accepted draft tokens, then the bonus token; once the row has ended, those that it kept."""
    ranks: Sequence[int] = ()
    """For a tree: the rank of each accepted node among the tree's nodes. The nodes of rank 0 ... n - 1 are those that
    a budget of n nodes would have verified."""
    levels: Sequence[int] = ()
    """For a tree: the number of levels that the draft has to grow for the node of each rank; 0 for lookup's."""
    from_lookup: Sequence[bool] = ()
    """Whether each accepted node comes from prompt lookup."""
    logprobs: Sequence[float] = ()
    """Log-probability of each token at temperature 1; empty unless reported."""
    fault: int = 0
    """See `TargetCache.faults`."""

    @classmethod
    def read(cls, line: list[int], width: int, report: Report) -> "RowRound":
        """line: a row of `RoundResult.lines`. width: depth + 1."""
        # The parts have `width` entries each, of which the first `count` are valid. The root precedes accepted nodes.
        count, fault, part = line[0], line[1], 2 + width
        tokens, from_lookup = line[2 : 2 + count], [mark > 0 for mark in line[part + 1 : part + count]]
        logprobs: Sequence[float] = ()
        if report.details:
            part += width
            logprobs = array("d", array("q", line[part : part + count]).tobytes())
        if not report.ranks:
            return cls(tokens, (), (), from_lookup, logprobs, fault)
        part += width
        return cls(tokens, line[part + 1 : part + count], line[part + width :], from_lookup, logprobs, fault)

    def accepted_by(self, tree: Plan) -> list[int]:
        """The levels, as above, of the nodes that a tree which this one covers would have accepted. A tree of fewer
        levels verifies more nodes of these levels. Those that this round did not verify are missing, so the number of
        nodes is a lower bound."""
        accepted = sorted(rank for rank in self.ranks if self.levels[rank] <= tree.levels)
        # A node has at most `rank` nodes of these levels before it.
        return [
            self.levels[rank]
            for rank in accepted
            if rank < tree.nodes or sum(level <= tree.levels for level in self.levels[:rank]) < tree.nodes
        ]


class Flight:
    """A round that was launched and whose result the host has not read."""

    def __init__(self, result: RoundResult, report: Report, traced: bool) -> None:
        """traced: whether the trace is read as well."""
        self.report = report
        self.width = result.tokens.shape[1]
        self._lines = Download(result.lines)
        self._trace = Download(result.trace) if traced and result.trace is not None else None
        self._scores = None if result.scores is None else Download(result.scores)

    def lines(self) -> np.ndarray:
        """`RoundResult.lines`. The host waits for the round here and nowhere else."""
        return self._lines.numpy()

    def tree(self, number: int, played: RowRound) -> Tree | None:
        """The tree of a row, which did `played`; None unless traces are read."""
        if self._trace is None:
            return None
        trace, origins = self._trace.numpy()[number].tolist(), round_origins(played.from_lookup)[:-1]
        nodes = (len(trace) - self.width) // 2
        path = trace[2 * nodes :]
        return Tree(trace[:nodes], trace[nodes : 2 * nodes], path[1 : len(origins) + 1], origins)

    def scores(self) -> list[list[list[float]]] | None:
        """`round_record.scores` of each row's tokens; None unless reported."""
        return None if self._scores is None else self._scores.numpy().tolist()
