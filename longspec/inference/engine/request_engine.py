"""The engine: requests in, events out. It runs on the thread that calls `step`; the scheduler is a thread around it."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from longspec.errors import UserError
from longspec.inference import engine_pool, memory, methods
from longspec.inference.arguments import check_request
from longspec.inference.device import free_bytes
from longspec.inference.drafting.decoders import new_decoder
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.drafting.reduced_head import head_bytes
from longspec.inference.engine.batch import PREFILL_CHUNK, Batch
from longspec.inference.engine.intake import least_shared
from longspec.inference.engine.requests import FinishReason, OnEvent, Request, Ticket
from longspec.inference.engine.rounds import KernelKey, size_class
from longspec.inference.engine.rows import Rows
from longspec.inference.engine.worker import Worker
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import Drafting, list_length, uses_draft
from longspec.inference.process_group import end_calls, repeat_calls
from longspec.inference.request import Sampling
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY, GREEDY_KIND, SamplingKind
from longspec.models.glide import GlideMixin
from longspec.models.parallel import least_over_ranks, model_parallel_rank_and_size
from longspec.models.target_files import position_limit
from longspec.models.target_split import rank_config


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made for. The less its requests may ask for, the fewer kernels a round has."""

    drafting: Drafting
    """Checked settings."""
    max_rows: int
    """Requests that run at the same time."""
    memory: int | None = None
    """Bytes for their caches and passes; None takes 90% of the free memory."""
    longest: int | None = None
    """Most tokens of a prompt and its answer, for which rows are given up if memory is short; None gives rows up
    to the target's whole context."""
    prefill_chunk: int = PREFILL_CHUNK
    """Most prompt tokens that are read between two rounds."""
    attention: str = "auto"
    """As for `longspec.generate`."""
    compile: bool = True
    """As for `longspec.generate`."""
    kind: SamplingKind | None = None
    """How all requests are sampled. None for a server: its requests may have any settings, and ask for
    log-probabilities, traces, and decoding without speculation."""
    refill: int = 1
    """Rows that must be idle before waiting requests get any, as long as others run. More mean more tokens per second,
    because a pass over few short prompts takes nearly as long as one over many, and a longer wait."""
    together: bool = False
    """Whether `max_rows` requests, of at most `longest` tokens each, are added before the first step, and none before
    `restart`. Their prompts are read before the first round, and the batch can go to the next engine of its kind."""
    in_blocks: bool = False
    """Whether events may bring the tokens of many vanilla rounds at once, which "auto" may also play. The host then has
    nothing to do for a row until its answer ends. Not for a server."""


class RequestEngine:
    """Answers requests with continuous batching; a row that finishes goes to the next request at once."""

    def __init__(self, model: GlideMixin, settings: EngineSettings) -> None:
        """Raises UserError if the memory does not suffice."""
        self.model, self.settings = model, settings
        self.batch = batch = repeat_calls(_build, model, {"settings": settings})
        self.longest = min(position_limit(model.config), batch.capacity - batch.depth - 1 - batch.nodes)
        """Most tokens of a prompt and its answer together."""
        self.is_closed = False
        # Prompts that start together are each read as a whole. A single row can only hold an earlier one.
        shares = not settings.together or batch.max_rows == 1
        least = least_shared(self._refill, batch.device) if self._refill > 1 else 1
        self._start(Rows(batch.max_rows, least if shares else None))

    @property
    def _refill(self) -> int:
        return min(self.settings.refill, self.batch.max_rows)

    def _start(self, rows: Rows) -> None:
        settings = self.settings
        chunk = None if settings.together else settings.prefill_chunk
        self.worker = Worker(self.batch, rows, chunk, self._refill, settings.in_blocks)
        self.clients, self.waiting = self.worker.clients, self.worker.intake.waiting

    def restart(self) -> None:
        """Forget the requests, which have all ended, with their counts and what "auto" has learned from them. The rows
        keep their tokens, and a single row's next request reuses them."""
        self.worker.wait()
        self._start(self.worker.rows)

    def prepare(self, usual: Sampling | None = None) -> None:
        """Before the first step: measure the plans of method "auto", and capture what most requests need. Other rounds
        are captured when they are first played. Without effect after `restart`. usual: settings whose penalties the
        captured rounds have."""
        with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
            if self.settings.together or self.settings.kind is None:
                self.batch.capture(usual)
            self.batch.measure()

    def add(self, request: Request, on_event: OnEvent) -> Ticket:
        """Queue a request. Raises RequestTooLarge, and UserError for a malformed one."""
        check_request(request, self.model.config.vocab_size, self.longest)
        ticket = Ticket(request, on_event, time.perf_counter())
        self.clients.open.add(ticket)
        self.waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket, reason: FinishReason = "cancelled") -> None:
        """End a request before its next round; one that has finished stays as it is."""
        self.clients.cancel(ticket, reason)

    def step(self) -> bool:
        """Read a chunk of prompts, then play a round. Returns whether requests are left."""
        with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
            self.worker.step()
        return bool(self.clients.open)

    def close(self, keeps: bool = False) -> None:
        """Let the other ranks that share the target go on. keeps: whether all requests have ended without a fault, so
        that a later engine can have the batch."""
        if not self.is_closed:
            self.is_closed = True
            if keeps:
                self.worker.wait()
                if self.batch.pooled.kind is not None:
                    self.batch.retire()
            end_calls()


def _build(model: GlideMixin, settings: EngineSettings) -> Batch:
    """A batch for these settings, `longest` rounded up: that of an earlier engine, if the requests are known."""
    runner = make_runner(model, settings.attention, settings.compile)
    with torch.no_grad(), torch.cuda.device_of(model.lm_head.weight):
        if settings.longest is None:
            return _new_batch(runner, settings, None)
        room = engine_pool.rounded_room(settings.longest, position_limit(runner.config))
        sizes = settings.max_rows, settings.max_rows, size_class(room)
        kernels = KernelKey(runner.kind, settings.drafting, settings.kind or GREEDY_KIND, *sizes)
        kind = engine_pool.batch_kind(kernels, runner), settings.together
        if (batch := engine_pool.borrow(kind, room, runner)) is not None:
            return batch
        settings = replace(settings, longest=room)
        return engine_pool.with_released_memory(model, lambda: _new_batch(runner, settings, kind))


def _new_batch(runner: Runner, settings: EngineSettings, kind: Hashable) -> Batch:
    """kind: the batch's key in the pool; None for a batch that is not kept."""
    drafting, room, is_served = settings.drafting, settings.longest or 0, settings.kind is None
    drafter = methods.make_drafter(drafting, runner, 1, GREEDY, is_served)
    # Whether one row can start after another. A drafting method of the user's own need not support it.
    shares = type(drafter).share is not Drafter.share
    if not shares and is_served:
        raise UserError(f"method: the drafter of {drafting.method!r} has no share(), which a server needs; add it")
    rows = settings.max_rows if shares else 1
    if settings.together:
        capacity = memory.slots_for(room, drafter.depth, drafter.nodes)
    else:
        rows, capacity = _fitting(runner, settings, rows, drafter.nodes)
    pooled = engine_pool.NOT_POOLED
    if kind is not None:
        size = settings.max_rows * memory.row_bytes(runner.config, runner.dtype, room + drafter.depth, drafter.nodes)
        size += head_bytes(runner.config, runner.dtype, list_length(runner.model, drafting), settings.max_rows)
        pooled = engine_pool.Pooled(kind, room, size, settings.together)
    return Batch(runner, drafting, rows, capacity, settings.prefill_chunk, settings.kind, pooled)


def _fitting(runner: Runner, settings: EngineSettings, most: int, nodes: int) -> tuple[int, int]:
    """Rows, at most `most`, and slots per row that fit into the memory. nodes: read per round and row."""
    model, drafting, dtype, longest = runner.model, settings.drafting, runner.dtype, settings.longest
    config = rank_config(model.config, *model_parallel_rank_and_size())
    fixed = head_bytes(config, dtype, list_length(model, drafting), most)
    fixed += memory.chunk_bytes(config, dtype, settings.prefill_chunk)
    room = position_limit(config) if longest is None else longest
    row, slot = new_decoder(runner, 1, nodes).state_bytes(room) if uses_draft(drafting) else (0, 0)
    row += nodes * config.vocab_size * memory.ROUND_BYTES
    slot += memory.slot_bytes(config, dtype)
    slots = memory.slots_for(room, nodes - 1, nodes)

    def fitting() -> tuple[int, int]:
        """Bytes that the batch may take, and the rows with all slots that fit into them."""
        budget = settings.memory or least_over_ranks(int(free_bytes(runner.device) * memory.SHARE), runner.device)
        return budget, most if longest is None else min(most, max(1, (budget - fixed) // (row + slots * slot)))

    budget, rows = fitting()
    if longest is None or rows < most:
        engine_pool.release(model)
        if runner.device.type == "cuda":
            torch.cuda.empty_cache()
        budget, rows = fitting()
    return rows, memory.row_capacity(budget, fixed, rows, slots, row, slot)
