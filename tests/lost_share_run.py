"""`inference_long-bench.py`, in which rank 1 dies in the second batch if FAULT is set. A run script for ranks."""

import os
from typing import Any

from longspec.inference.engine.batch import Batch
from longspec.longbench.command import main

BATCH = 3
"""Number of the prompt with the fault; the first one is the warm-up."""
first_tokens = Batch.first_tokens
calls = 0


def faulty(*arguments: Any) -> Any:
    global calls
    calls += 1
    if calls == BATCH:
        os._exit(9)
    return first_tokens(*arguments)


if __name__ == "__main__":
    if os.environ["RANK"] == "1" and os.environ["FAULT"]:
        Batch.first_tokens = faulty  # type: ignore[method-assign]
    main()
