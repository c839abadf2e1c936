"""The trainer, in which rank 0 reads the FIFO WAITS_FOR before step 1. A run script for the launcher.

The other ranks wait for rank 0 in a collective, which no signal interrupts."""

import os
from pathlib import Path

from longspec.ranks.agreement import Termination, from_rank_zero
from longspec.train import run


class WaitingTrainer(run.Trainer):
    def run(self, termination: Termination) -> bool:
        from_rank_zero(lambda: Path(os.environ["WAITS_FOR"]).read_text())
        return super().run(termination)


run.Trainer = WaitingTrainer  # type: ignore[misc]
run.main()
