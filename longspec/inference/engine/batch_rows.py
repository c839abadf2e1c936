"""The rows of a batch on the device: their caches and settings, which requests take over one after another."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.process_group import repeated
from longspec.inference.request import PenaltyKind, Sampling
from longspec.inference.row_settings import SERVED_PENALTIES, PenaltyRows, RowSettings
from longspec.inference.runner import Runner
from longspec.kernels.shared.device import upload

EXCHANGED_BYTES = 2**26
"""Most bytes of each side that an exchange of rows copies at a time, unless a single layer has more."""


class BatchRows:
    """The tensors of `max_rows` rows, which rounds change in place."""

    drafter: Drafter
    """The state of the draft of all rows."""

    def __init__(self, runner: Runner, max_rows: int, capacity: int, penalties: PenaltyKind | None) -> None:
        """capacity: slots per row of the target's cache. penalties: those of all requests, if they are known;
        otherwise memory for them is taken at the first request that has any."""
        self.runner, self.device = runner, runner.device
        self.max_rows, self.capacity = max_rows, capacity
        self.settings = RowSettings.allocate(max_rows, runner.device, penalties, capacity)
        positions = self.settings.positions
        self.cache = TargetCache(runner.config, max_rows, capacity, runner.dtype, runner.device, positions)
        self.root = torch.zeros(max_rows, dtype=torch.long, device=runner.device)
        self.active = torch.zeros(max_rows, dtype=torch.bool, device=runner.device)
        """bool [B]: the rows that rounds advance."""
        self.speculates = torch.zeros_like(self.active)
        """bool [B]: the rows whose proposals count."""

    def upload(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Rows of tokens, int64, as LongTensor [n, longest] on the device, padded on the right."""
        return upload(pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True), self.device)

    @repeated
    def assign(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        samplings: Sequence[Sampling],
        seeds: Sequence[int],
        speculates: Sequence[bool],
    ) -> None:
        """Set the sampling settings of some rows, of which the cache holds `lengths` tokens."""
        self._make_room_for_penalties(samplings)
        numbers, stored = upload(torch.tensor([rows, lengths]), self.device)
        self.settings.assign(numbers, samplings, seeds)
        self.cache.lengths[numbers] = stored.int()
        self.speculates[numbers] = upload(torch.tensor(speculates), self.device)

    def _make_room_for_penalties(self, samplings: Sequence[Sampling]) -> None:
        """Allocate the texts and penalties of all rows for the first request that has any."""
        if self.settings.penalties is None and any(sampling.penalties is not None for sampling in samplings):
            most = SERVED_PENALTIES[-1]
            self.settings.penalties = PenaltyRows.allocate(self.max_rows, self.capacity, most, self.device)

    @repeated
    def end(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Take rows out of the rounds; their slots up to `lengths` stay. The next slots are zeroed: a round in flight
        may store NaN in them, and masked slots must be finite."""
        numbers, stored = upload(torch.tensor([rows, lengths]), self.device)
        self.active.index_fill_(0, numbers, False)
        self.cache.lengths[numbers] = stored.int()
        slots = stored[:, None] + torch.arange(self.drafter.nodes, device=self.device)
        for store in (self.cache.keys, self.cache.values):
            store[:, numbers[:, None], :, slots] = store.new_zeros(())

    @repeated
    def clear(self, row: int) -> None:
        """Zero the keys and values of a row. Masked slots must be finite, and those of a faulty request may be NaN."""
        self.cache.keys[:, row].zero_()
        self.cache.values[:, row].zero_()

    @repeated
    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Copy the keys and values of the first `length` slots of row `source` to another row."""
        for store in (self.cache.keys, self.cache.values):
            store[:, row, :, :length] = store[:, source, :, :length]

    @repeated
    def move(self, a: Sequence[int], b: Sequence[int], length: int) -> None:
        """Exchange rows a, which run, with rows b, which do not. length: tokens of the longest one."""
        cache, settings = self.cache, self.settings
        both = upload(torch.tensor([[*a, *b], [*b, *a]]), self.device)
        for store in (cache.keys, cache.values):
            used = store[:, :, :, :length]
            # Few layers at a time, because an exchange copies both sides.
            for layers in used.split(max(1, EXCHANGED_BYTES // (len(a) * used[0, 0].nbytes))):
                _exchange(layers, 1, both)
        _exchange(settings.numbers, 1, both)
        states = (cache.lengths, cache.newest_hidden, cache.faults, self.root, self.active, self.speculates)
        texts = [] if settings.penalties is None else settings.penalties.tensors
        # A draft that reads layers is fed while a prompt is read.
        for state in (*self.drafter.row_states(), *states, settings.greedy, *texts):
            _exchange(state, 0, both)


def _exchange(x: Tensor, dim: int, rows: Tensor) -> None:
    """Put rows[0] of x in the places of rows[1]. rows: LongTensor [2, n]."""
    x.index_copy_(dim, rows[1], x.index_select(dim, rows[0]))
