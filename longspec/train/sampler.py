"""The order in which ranks read the rows of the data set, and the processes that load them."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

from longspec.data.collators import Collator
from longspec.signals import STOP_SIGNALS, end_with_parent
from longspec.train.inputs import Inputs


@dataclass(eq=False)
class ResumableSampler(Sampler[list[int]]):
    """Row numbers of one rank's micro-batches. They depend only on the micro-step, so a run can start at any step.

    All ranks read one endless sequence of rows, reshuffled each epoch. Micro-step m takes the next `batch_size` ·
    `world_size` rows, in order of rank. The last rows of an epoch share an optimizer step with the first rows of the
    next one, so every step has a full batch and no row is skipped or padded.
    """

    rows: int
    """Rows of the data set, > 0."""
    batch_size: int
    rank: int
    world_size: int
    seed: int
    start: int
    stop: int
    """The micro-step after the last one."""

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.batch, range(self.start, self.stop))

    def batch(self, micro_step: int) -> list[int]:
        """This rank's row numbers in `micro_step`."""
        first = (micro_step * self.world_size + self.rank) * self.batch_size
        return [self._row(index) for index in range(first, first + self.batch_size)]

    def _row(self, index: int) -> int:
        """The row number at `index` of the endless sequence."""
        epoch, index_in_epoch = divmod(index, self.rows)
        return int(_order(self.rows, self.seed, epoch)[index_in_epoch])


@lru_cache(maxsize=1)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch. All ranks compute the same permutation and read different parts of it."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def loader(inputs: Inputs, sampler: ResumableSampler, num_workers: int, accumulation: int) -> DataLoader:
    """Micro-batches as NumPy arrays by name. `accumulation` of them are one optimizer step."""
    # A step takes all of its micro-batches at once, so the next step is loaded while this one trains.
    prefetch_factor = -(-accumulation // num_workers) + 1 if num_workers else None
    return DataLoader(
        inputs.rows,
        batch_sampler=sampler,
        collate_fn=partial(_as_arrays, inputs.collate),
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        worker_init_fn=_start_worker,
    )


def _start_worker(_: int) -> None:
    # Signals to the process group reach it, too, while the step still needs its rows.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The other workers keep its pipe open: when the rank is gone, it would wait forever to write.
    end_with_parent(by=signal.SIGKILL)


def _as_arrays(collate: Collator, rows: Any) -> dict[str, np.ndarray]:
    """Collate `rows` to arrays, which pickle by value. A tensor would hold a shared-memory file open."""
    return {name: tensor.numpy() for name, tensor in collate(rows).items()}
