"""The evaluation command, with a fault on one of its ranks: FAULT=RANK:BATCH:NAME."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.longbench import measurement

ROOT = Path(__file__).resolve().parents[1]
real = measurement.generate
calls = []


def faulty(*args: Any, **settings: Any) -> Any:
    """Decode a batch. The fault strikes in the measured batch of that number, counted from 0 after the warm-up."""
    calls.append(settings)
    if len(calls) == batch + 2:
        if name == "error":
            raise UserError("sample 'x': bad")
        os.kill(os.getpid(), getattr(signal, name))
    return real(*args, **settings)


if __name__ == "__main__":
    rank, batch, name = os.environ["FAULT"].split(":")
    batch = int(batch)
    if os.environ["RANK"] == rank:
        measurement.generate = faulty
    runpy.run_path(str(ROOT / "inference_long-bench.py"), run_name="__main__")
