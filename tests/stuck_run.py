"""Run for each rank: rank 1 ends as FAULT says, and the others sit in a call that hears no signal and never returns.

As a rank does that waits for its device: in C, without the interpreter's lock.
"""

import atexit
import ctypes
import os

import torch.distributed as dist

from longspec.train import peers
from longspec.train.distributed import Termination, from_every_rank, start_ranks
from longspec.train.logging import setup_logging


def wait_for_ever() -> None:
    mutex = ctypes.create_string_buffer(64)  # all zero: a mutex that nobody holds
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


peers.END_S, peers.QUIET_S = 4, 1
start_ranks()
setup_logging(dist.get_rank())
with peers.peers_watched(), Termination():
    from_every_rank(None)
    if dist.get_rank() == 1 and os.environ["FAULT"] == "dies":
        os.kill(os.getpid(), 9)
    if dist.get_rank() == 1:
        atexit.register(wait_for_ever)  # as what still runs on a device may keep a process from ending
        raise ValueError("this rank has had enough")
    wait_for_ever()
