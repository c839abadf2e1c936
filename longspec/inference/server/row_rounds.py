"""Rounds over the rows of a server's batch, with all that the host reads of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.inference.engine import Played, Rounds
from longspec.inference.origins import Origin
from longspec.inference.server.requests import Tree
from longspec.kernels.decoding.vocabulary import log_sum_exp


class RowResult(NamedTuple):
    """What the host reads of a round."""

    report: Tensor
    """fp64 [B, 3 * depth + 5]: tokens, their log-probabilities, `RoundResult.from_lookup`, count, fault. For a tree of
    method "auto", the ranks and levels of `RoundResult` precede the count."""
    trace: Tensor
    """LongTensor [B, 2 * N + depth + 1]: the nodes' tokens and parents, the accepted path."""
    width: int
    """depth + 1."""


@dataclass(frozen=True)
class RowReport:
    """The result of a round in one row."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token at temperature 1."""
    from_lookup: list[bool]
    """Whether each accepted node comes from prompt lookup."""
    ranks: list[int]
    levels: list[float]
    """As in `controller.RowRound`; both are empty if the report holds no ranks."""
    fault: int

    @classmethod
    def read(cls, line: list[float], width: int) -> RowReport:
        """line: a row of `RowResult.report`."""
        *values, count, fault = line
        tokens, logprobs, from_lookup, ranks = (values[part * width :][: int(count)] for part in range(4))
        # The root precedes the accepted nodes.
        matches = [bool(mark) for mark in from_lookup[1:]]
        return cls(_whole(tokens), logprobs, matches, _whole(ranks[1:]), values[4 * width :], int(fault))


def read_tree(trace: list[int], width: int, origins: list[Origin]) -> Tree:
    """The tree of a round in one row. trace: its row of `RowResult.trace`; origins: one per accepted node."""
    nodes = (len(trace) - width) // 2
    path = trace[2 * nodes :]
    return Tree(trace[:nodes], trace[nodes : 2 * nodes], path[1 : len(origins) + 1], origins)


class RowRounds(Rounds):
    """Rounds that return all results for the host."""

    reports_ranks = False
    """Whether the report holds the ranks of the accepted nodes."""

    @property
    def kind(self) -> Hashable:
        # Compaction runs over the whole cache, and Triton compiles its kernel anew for some numbers of rows.
        return (super().kind, self.cache.all_rows)

    def round(self, active: Tensor) -> RowResult:
        played = self.play(active)
        result = played.result(self.reports_ranks)
        columns = [result.tokens, _log_probabilities(played), result.from_lookup]
        columns += [column for column in (result.ranks, result.levels) if column is not None]
        columns += [result.counts[:, None], self.cache.faults[:, None]]
        report = torch.cat([column.double() for column in columns], 1)
        proposal = played.proposal
        trace = torch.cat([proposal.tokens, proposal.parents, played.accepted.path], 1)
        return RowResult(report, trace, proposal.depth + 1)


def _whole(values: Sequence[float]) -> list[int]:
    return [int(value) for value in values]


def _log_probabilities(played: Played) -> Tensor:
    """Log-probability [B, depth + 1] of each emitted token, at temperature 1."""
    logits, path = played.logits, played.accepted.path
    chosen = logits.flatten(1).gather(1, path * logits.shape[2] + played.tokens)
    return chosen - log_sum_exp(logits).gather(1, path)
