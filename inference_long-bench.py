"""Measure a target, alone or with its draft, on LongBench tasks and AIME24; see `--help`."""

import os
import signal
from types import FrameType


def end_at_once(number: int, frame: FrameType | None) -> None:
    """Handles a stop signal while the libraries are imported; `main` installs its own handlers."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    for stop_signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(stop_signal) is not signal.SIG_IGN:
            signal.signal(stop_signal, end_at_once)
    from longspec.longbench.command import main

    main()
