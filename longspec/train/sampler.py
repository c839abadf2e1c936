"""Which rows each rank trains on, and when."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from longspec.train.distributed import ignore_stop_signals


class ResumableSampler(Sampler[list[int]]):
    """Batches of row numbers for one rank, a function of the micro-step alone, so a run can start at any of them.

    All ranks walk one endless sequence: the rows in a new order each epoch. Micro-step m takes the next
    `batch_size` · `world_size` of it, rank after rank. An epoch's last rows share an optimizer step with the next
    epoch's first ones, so every step has its full batch and no row is skipped or padded.
    """

    def __init__(
        self, rows: int, batch_size: int, rank: int, world_size: int, seed: int, start: int, stop: int
    ) -> None:
        """Micro-steps `start` … `stop` - 1 of a dataset with `rows` rows (> 0)."""
        self.rows, self.batch_size, self.rank, self.world_size = rows, batch_size, rank, world_size
        self.seed, self.start, self.stop = seed, start, stop
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.batch, range(self.start, self.stop))

    def batch(self, micro_step: int) -> list[int]:
        """This rank's row numbers in `micro_step`."""
        first = (micro_step * self.world_size + self.rank) * self.batch_size
        return [self._row(place) for place in range(first, first + self.batch_size)]

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, self.rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return int(self._order[index])


def loader(
    rows: Any, collate: Callable[[Any], dict[str, Tensor]], sampler: ResumableSampler, num_workers: int, ahead: int
) -> DataLoader:
    """Micro-batches as NumPy arrays by name. `num_workers` processes keep at least `ahead` of them ready."""
    return DataLoader(
        rows,
        batch_sampler=sampler,
        collate_fn=partial(_as_arrays, collate),
        num_workers=num_workers,
        # A step takes its whole window at once: while one trains, the next is loaded.
        prefetch_factor=-(-ahead // num_workers) + 1 if num_workers else None,
        worker_init_fn=ignore_stop_signals,
    )


def _as_arrays(collate: Callable[[Any], dict[str, Tensor]], rows: Any) -> dict[str, np.ndarray]:
    """A micro-batch that goes through a pipe: each tensor would hold a file open until its window is over."""
    return {name: tensor.numpy() for name, tensor in collate(rows).items()}
