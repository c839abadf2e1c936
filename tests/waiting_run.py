"""Run by the launcher in place of the trainer: the same, but rank 0 reads the FIFO that WAITS_FOR names before step 1.

The other ranks wait for it in a collective, which no signal interrupts.
"""

import os
from pathlib import Path

from longspec.train.distributed import from_rank_zero
from longspec.train.trainer import main

main(before_steps=lambda: from_rank_zero(lambda: Path(os.environ["WAITS_FOR"]).read_text()))  # type: ignore[arg-type]
