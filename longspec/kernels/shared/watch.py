"""A record of sequences whose logits define no distribution, written by the kernels that read the logits."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Watch(NamedTuple):
    """The faults of a batch, and the number to enter for a new one.

    A row of logits is faulty if, divided by the temperature, it holds NaN or +inf or consists of -inf. (One logit of
    -inf is a token of probability 0.) Only a faulty row causes memory traffic.
    """

    faults: Tensor
    """LongTensor [B]; 0 until a sequence has a faulty row."""
    fault: int
    """Entered for a sequence with a faulty row; not 0."""

    def record(self, is_faulty: Tensor) -> None:
        """Enter the fault for sequences with a faulty row. is_faulty: bool [B] or [B, n]."""
        self.faults.masked_fill_(is_faulty.reshape(len(is_faulty), -1).any(1), self.fault)


def launch_arguments(watch: Watch | None) -> tuple[Tensor | None, int]:
    """A kernel's arguments `faults_ptr` and `fault`."""
    return (None, 0) if watch is None else (watch.faults, watch.fault)
