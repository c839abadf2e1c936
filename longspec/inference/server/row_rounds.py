"""Rounds over the rows of a server's batch, with all that the host reads of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from longspec.inference.engine import Played, Rounds
from longspec.inference.sampling import Sampler
from longspec.inference.server.row_sampling import RowSampler


class RowRounds(Rounds):
    """Rounds that return all results for the host in two tensors."""

    samplers: Sequence[Sampler] = ()
    """Samplers of draft and target."""
    reports_ranks = False
    """Whether the report holds the ranks of the accepted nodes."""

    @property
    def kind(self) -> Hashable:
        # Compaction runs over the whole cache, and Triton compiles its kernel anew for some numbers of rows.
        return (super().kind, type(self.sampler), self.sampler.truncates, self.cache.all_rows)

    def round(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """Play a round. Returns the report, fp64 [B, 2 * depth + 4]: tokens, their log-probabilities, count, fault;
        and the trace, LongTensor [B, 2 * N + depth + 1]: the nodes' tokens and parents, the accepted path.

        With `reports_ranks`, depth + 1 ranks precede the count.
        """
        for sampler in self.samplers:
            if isinstance(sampler, RowSampler):
                sampler.rewind()
        played = self.play(active)
        proposal = played.proposal
        columns = [played.tokens, _log_probabilities(played)]
        if self.reports_ranks:
            assert proposal.ranks is not None
            columns.append(proposal.ranks.gather(1, played.accepted.path))
        columns += [played.counts[:, None], self.cache.faults[:, None]]
        report = torch.cat([column.double() for column in columns], 1)
        return report, torch.cat([proposal.tokens, proposal.parents, played.accepted.path], 1)


def _log_probabilities(played: Played) -> Tensor:
    """Log-probability [B, depth + 1] of each emitted token, at temperature 1."""
    path = played.accepted.path[..., None].expand(-1, -1, played.logits.shape[2])
    logits = played.logits.gather(1, path)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(-1, played.tokens[..., None])[..., 0]
