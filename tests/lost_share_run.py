"""`inference_long-bench.py`, in which rank 1 dies or receives SIGTERM in the second batch. A run script for ranks.

The environment variable FAULT is `dies`, `signal` or empty.
"""

import os
import signal
from typing import Any

from longspec.inference.engine.batch import Batch
from longspec.longbench.command import main

FAULT = os.environ["FAULT"]
BATCH = 3
"""Number of the prompt with the fault; the first one is the warm-up."""
first_tokens = Batch.first_tokens
calls = 0


def faulty(*arguments: Any) -> Any:
    global calls
    calls += 1
    if calls == BATCH and FAULT == "dies":
        os._exit(9)
    if calls == BATCH and FAULT == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    return first_tokens(*arguments)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Batch.first_tokens = faulty  # type: ignore[method-assign]
    main()
