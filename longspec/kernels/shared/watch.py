"""A record of the sequences whose logits define no distribution, written by the kernels that read the logits."""

from typing import NamedTuple

from torch import Tensor


class Watch(NamedTuple):
    """The faults of a batch and the number to record for a new one.

    A row of logits is faulty if, divided by the temperature, it contains NaN or +inf or only -inf. (A single logit of
    -inf is a token of probability 0.) Only faulty rows cause memory traffic.
    """

    faults: Tensor
    """Fault of each sequence, LongTensor [B]; 0 as long as it has none."""
    fault: int
    """Number to record for a sequence with a faulty row; not 0."""

    def record(self, is_faulty: Tensor) -> None:
        """Record the fault for sequences with a faulty row; is_faulty is bool [B] or [B, n]."""
        # On the device: the host reads the faults together with the tokens of the round.
        self.faults.masked_fill_(is_faulty.reshape(len(is_faulty), -1).any(1), self.fault)


def launch_arguments(watch: Watch | None) -> tuple[Tensor | None, int]:
    """The arguments `faults_ptr` and `fault` of a kernel."""
    return (None, 0) if watch is None else (watch.faults, watch.fault)
