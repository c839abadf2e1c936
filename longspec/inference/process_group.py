"""One target on several processes: starting them, and the calls that all of them make.

Rank 0 runs the command: it alone reads prompts, prints and writes files. The others repeat its calls, each with its
part of the target; rank 0 does not wait for them. Each round compares its tokens (see `TargetCache.compare_ranks`).
"""

import gc
import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.device import choose_device
from longspec.inference.engine_pool import release_all
from longspec.models.parallel import model_parallel_rank_and_size, share_target
from longspec.ranks.agreement import attempt, connecting, from_every_rank, from_rank_zero, launched_ranks, waiting_group
from longspec.ranks.peers import watched
from longspec.signals import StopSignals

T = TypeVar("T")
Owner = TypeVar("Owner")
P = ParamSpec("P")

MESSAGE_BYTES = 1024
"""Size of a message; the rest of a longer one follows in a second one."""
_leads = False
"""Whether other ranks repeat the calls of this process."""
_sent: deque[tuple[dist.Work, Tensor]] = deque()
"""Messages of rank 0 that other ranks may not have received."""


@contextmanager
def shared_target(tp_size: int, device: str | None, stop: StopSignals) -> Iterator[None]:
    """Context of a command whose target is shared by the `tp_size` ranks of its launch; 1 changes nothing. Only rank 0
    enters it; the others follow and exit when it leaves. A signal to any rank reaches `stop` on rank 0; a rank that
    dies ends the others (see `ranks.peers`). Raises UserError, on one rank, for a launch that does not fit."""
    if tp_size < 1:
        raise UserError(f"--tp_size: {tp_size}; it must be at least 1")
    if tp_size == 1:
        yield
        return
    rank, world_size = launched_ranks()
    try:
        own_device = check_launch(tp_size, world_size, device)
    except UserError:
        if rank > 0:
            raise SystemExit(2) from None  # rank 0 reports it
        raise
    with watched(stop) as watch:
        connect(own_device)
        watch.connect()
        share_target(dist.group.WORLD)
        try:
            if rank > 0:
                _follow(stop)
            else:
                with _leading():
                    yield
        except RuntimeError as error:
            # The collectives of the others fail when a rank is gone.
            if (lost := watch.lost_rank()) is None:
                raise
            reporter = 1 if lost == 0 else 0
            if rank == reporter and stop.received is None:
                print(f"error: rank {lost} is gone, so all ranks that share the target end", file=sys.stderr)
            raise SystemExit(1) from error
        finally:
            share_target(None)
            if rank > 0:
                stop.at_once = False  # rank 0 reports the stop
    disconnect()
    if rank > 0:
        raise SystemExit(0)


@contextmanager
def only_rank_zero(tp_size: int, device: str | None) -> Iterator[None]:
    """`shared_target` for a command that does not wait for stop signals: one ends it at once."""
    if tp_size == 1:
        yield
        return
    with StopSignals(at_once=True) as stop, shared_target(tp_size, device, stop):
        yield


def check_launch(tp_size: int, world_size: int, device: str | None) -> torch.device:
    """The device of this process: the CPU, or the GPU of its local rank. Raises UserError for a launch without it."""
    if world_size != tp_size:
        raise UserError(
            f"--tp_size {tp_size}: this launch has {world_size} processes; all of them share the target, so start "
            f"{tp_size} with torchrun --nproc_per_node {tp_size}"
        )
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return chosen
    if chosen.index is not None:
        raise UserError(f"--device {device}: each rank of --tp_size takes the GPU of its number; give cuda")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
    if ranks > torch.cuda.device_count():
        raise UserError(f"--tp_size {tp_size}: {ranks} ranks on a machine with {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def connect(device: torch.device) -> None:
    """Join the process group: NCCL on GPUs, gloo on the CPU."""
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        # Without NVLink multicast, which needs a fabric manager that virtual machines often lack.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with connecting():
        dist.init_process_group(backend)


def disconnect() -> None:
    """Leave the process group. Captured rounds go first: NCCL waits for the end of each graph that has its calls."""
    release_all()
    gc.collect()
    dist.destroy_process_group()


@contextmanager
def _leading() -> Iterator[None]:
    """The part of rank 0. The other ranks end with the command: a message that is a number is their exit code."""
    global _leads
    _leads = True
    try:
        yield
    except UserError:
        _end_others(2)
        raise
    else:
        _end_others(0)
    finally:
        _leads = False


def _end_others(code: int) -> None:
    _send(code)
    while _sent:
        _sent.popleft()[0].wait()


def _follow(stop: StopSignals) -> None:
    """Repeat the calls of rank 0 until it ends. Raises SystemExit if it ends with an error."""
    logging.getLogger("longspec").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = None
    while not isinstance(message := _receive(), int):
        function, arguments = message
        # A signal ends the loading immediately, and other calls when rank 0 ends.
        stop.at_once = function is not _repeat
        with suppress(UserError):  # rank 0 gets the same error
            if function is _repeat:
                _repeat(model, **arguments)
            else:
                model = function(**arguments)
    if message:
        raise SystemExit(message)


def _send(message: Any) -> None:
    """Send a message to the other ranks, if there are any, without waiting for them."""
    if not _leads:
        return
    while _sent and _sent[0][0].is_completed():
        _sent.popleft()[0].wait()
    data = pickle.dumps(message)
    data = len(data).to_bytes(8, "little") + data
    head, rest = data[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"), data[MESSAGE_BYTES:]
    for part in filter(None, (bytearray(head), bytearray(rest))):
        sent = torch.frombuffer(part, dtype=torch.uint8)
        _sent.append((dist.broadcast(sent, 0, waiting_group(), async_op=True), sent))


def _receive() -> Any:
    """The next message of rank 0."""
    data, missing, end = b"", MESSAGE_BYTES, 0
    while missing > 0:
        part = torch.empty(missing, dtype=torch.uint8)
        dist.broadcast(part, 0, waiting_group())
        data += part.numpy().tobytes()
        end = 8 + int.from_bytes(data[:8], "little")
        missing = end - len(data)
    return pickle.loads(data[8:end])  # of this command's own rank 0


def same_on_all_ranks(compute: Callable[[], T]) -> T:
    """Rank 0's result of `compute()`, on every rank that shares the target. Only rank 0 calls it."""
    return compute() if model_parallel_rank_and_size()[1] == 1 else from_rank_zero(compute)


def repeat_calls(build: Callable[..., T], model: Any, arguments: Mapping[str, Any]) -> T:
    """`build(model, **arguments)`, on all ranks. The others repeat calls of its `repeated` methods until
    `end_calls`."""
    _send((_repeat, {"build": build, "arguments": arguments}))
    return build(model, **arguments)


def repeated(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """A method that all ranks call alike, with arguments on the host. No such method calls another one."""

    @wraps(method)
    def call(owner: Owner, /, *arguments: P.args, **named: P.kwargs) -> T:
        _send((method.__name__, arguments, named))
        return method(owner, *arguments, **named)

    return call


def end_calls() -> None:
    """The other ranks end the repetition of `repeat_calls`."""
    _send(None)


def _repeat(model: Any, build: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """The part of another rank in `repeat_calls`."""
    with torch.no_grad():
        built = build(model, **arguments)
        while (message := _receive()) is not None:
            name, positional, named = message
            getattr(built, name)(*positional, **named)


def repeat_load(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Let the other ranks call `function`, which returns this rank's part of the pair. No effect without them."""
    _send((function, arguments))


def on_every_rank(compute: Callable[[], T]) -> T:
    """The result of `compute()`, which each rank that shares the target calls. A UserError of one is raised on all."""
    if model_parallel_rank_and_size()[1] == 1:
        return compute()
    results, problem = attempt(compute)
    for reported in from_every_rank(problem):
        if reported is not None:
            raise UserError(reported)
    return results[0]
