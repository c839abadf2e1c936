"""Where kernels that read logits record that a distribution is undefined."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Watch(NamedTuple):
    """A record of sequences whose logits define no distribution.

    A row of logits is faulty if it holds NaN or +inf once it is divided by the temperature, or nothing above -inf.
    (A logit of -inf alone is a token of probability 0.) A fault costs a store; a row without one costs no memory
    traffic.
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
