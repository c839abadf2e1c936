"""Ranks of a run on the CPU, forked from a process that has already imported the trainer.

The `deepspeed` command imports torch and DeepSpeed in four processes for a run of two ranks, which takes several times
as long as the run of a test. Tests about the command itself use `training_fixtures.deepspeed_launch`.
"""

import io
import multiprocessing
import os
import runpy
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["longspec.train.run"])
Rank = multiprocessing.context.ForkServerProcess


def start_forked(
    script: str, arguments: list[str], ranks: int, port: int, environment: dict[str, str], stdout: Path, stderr: Path
) -> list[Rank]:
    """Start `script` on each rank, in the repository's folder; its output is appended to the two files."""
    with mock.patch.dict(os.environ, environment, clear=True):  # for the imports, if this is the first call
        forkserver.ensure_running()
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for number in range(ranks):
        variables = environment | world | {"RANK": str(number), "LOCAL_RANK": str(number)}
        rank = _CONTEXT.Process(target=_run, args=(script, arguments, variables, str(stdout), str(stderr)))
        rank.start()
        started.append(rank)
    return started


def _run(script: str, arguments: list[str], variables: dict[str, str], stdout: str, stderr: str) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, number)
        os.close(log)
    multiprocessing.set_start_method("fork", force=True)  # or a loading process would import everything anew
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    sys.stdin = io.StringIO(variables.get("STDIN", ""))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def exit_code(ranks: list[Rank], timeout_s: float) -> int:
    """Wait until all ranks have ended by themselves; the exit code of the first one that failed, or 0. Raises
    TimeoutError, with the ranks killed, after `timeout_s` seconds."""
    code, deadline = 0, time.monotonic() + timeout_s
    running = list(ranks)
    while running:
        if not wait([rank.sentinel for rank in running], max(0, deadline - time.monotonic())):
            kill(ranks)
            raise TimeoutError(f"ranks still run after {timeout_s} s")
        for rank in running:
            if not rank.is_alive():
                code = code or rank.exitcode
        running = [rank for rank in running if rank.is_alive()]
    return code


def kill(ranks: list[Rank]) -> None:
    """SIGKILL all ranks; their loading processes notice and end by themselves."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
