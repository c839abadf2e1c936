"""The `longspec` command with a fault on one rank: FAULT=RANK:CALL:NAME, where NAME is a signal or `error`.

With SHARED a unit of work is a batch, in which ranks that share a target take part together. With DISKS=FOLDER each
rank runs in a folder of its own, so that a relative path is local to it.
"""

import os
import signal
import sys
from typing import Any

from longspec.cli.answers import PromptRun
from longspec.cli.app import main
from longspec.errors import UserError
from longspec.inference.engine.batch import Batch
from longspec.longbench import measurement
from longspec.regenerate.shards import SplitShards

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "evaluate": (measurement, "sample_line"),
    "generate": (PromptRun, "line"),
    "regenerate": (SplitShards, "write"),
    "shared": (Batch, "first_tokens"),
}
"""The function of each command that does a unit of work."""


def break_call(call: int, name: str) -> None:
    """Let the fault strike at the start of unit number `call` of the command in `sys.argv`."""
    owner, attribute = FUNCTIONS["shared" if "SHARED" in os.environ else sys.argv[1]]
    real = getattr(owner, attribute)
    calls: list[None] = []

    def faulty(*args: Any, **settings: Any) -> Any:
        calls.append(None)
        if len(calls) == call + 1:
            if name == "error":
                raise UserError("sample 'x': bad")
            os.kill(os.getpid(), getattr(signal, name))
        return real(*args, **settings)

    setattr(owner, attribute, faulty)


if __name__ == "__main__":
    if "DISKS" in os.environ:
        os.chdir(os.path.join(os.environ["DISKS"], os.environ["RANK"]))
    rank, call, name = os.environ.get("FAULT", "-1:0:none").split(":")
    if os.environ["RANK"] == rank:
        break_call(int(call), name)
    main()
