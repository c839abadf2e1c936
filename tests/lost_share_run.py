"""`inference_long-bench.py`, in which rank 1 dies or receives SIGTERM in the second batch. A run script for ranks.

The environment variable FAULT is `dies`, `signal` or empty.
"""

import os
import signal
from typing import Any

from longspec.inference.engine.engine import Engine
from longspec.longbench.command import main

FAULT = os.environ["FAULT"]
BATCH = 3
"""Number of the call of `generate` with the fault; the first one is the warm-up."""
prefill = Engine.prefill
calls = 0


def faulty(engine: Engine) -> Any:
    global calls
    calls += 1
    if calls == BATCH and FAULT == "dies":
        os._exit(9)
    if calls == BATCH and FAULT == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    return prefill(engine)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        Engine.prefill = faulty  # type: ignore[method-assign]
    main()
