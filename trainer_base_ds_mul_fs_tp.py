"""Train a draft: `deepspeed … ./trainer_base_ds_mul_fs_tp.py -cp conf/exp -cn <experiment> [key=value …]`."""

import os
import signal
import sys
from types import FrameType


def end(number: int, frame: FrameType | None) -> None:
    """Handle a signal during the imports, which take seconds; `main` has handlers of its own."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{signal.Signals(number).name}: stopped before the first step", file=sys.stderr, flush=True)
    os._exit(128 + number)


if __name__ == "__main__":
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(stop) is not signal.SIG_IGN:  # as nohup ignores SIGHUP
            signal.signal(stop, end)

    from longspec.train.command import main

    main()
