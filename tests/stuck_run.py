"""A rank of a run in which rank 1 dies or stops as FAULT says, and the others are in a call that no signal ends.

The call is in C and does not hold the GIL, like that of a rank that waits for its device.
"""

import ctypes
import os
import signal

import torch.distributed as dist

from longspec.ranks import agreement, peers
from longspec.ranks.agreement import Termination, from_every_rank
from longspec.train.distributed import start_ranks
from longspec.train.logging import setup_logging


def wait_for_ever() -> None:
    mutex = ctypes.create_string_buffer(64)  # all zero: a mutex that nobody holds
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


agreement.WAIT_S, peers.END_S, peers.QUIET_S, peers.SILENT_S = 1, 4, 1, 5
setup_logging(agreement.launched_ranks()[0])
start_ranks()
with Termination() as termination, peers.watched(termination) as watch:
    watch.connect()
    from_every_rank(None)
    if dist.get_rank() == 1 and os.environ["FAULT"] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and os.environ["FAULT"] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_ever()
