"""The host's part of a generation: collects the tokens of each row, ends rows, counts and streams."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.cache import fault_message
from longspec.inference.engine.engine import Engine
from longspec.inference.engine.round_record import Flight, RowRound
from longspec.inference.engine_pool import with_released_memory
from longspec.inference.origins import Origin, round_origins
from longspec.inference.round_source import RoundSource
from longspec.inference.stats import GenerationStats

Stops = Callable[[int, Sequence[int]], bool]
"""Whether a row ends after its newest token, for other reasons than EOS and the token limit. Called with the row number
and its new tokens."""


class Streamer(Protocol):
    """transformers' streamer interface, with an optional third method.

    If a streamer has `put_from(value: Tensor, origin: Origin) -> None`, it receives the new tokens through it, and only
    the prompt through `put`.
    """

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Decoder:
    """Runs an engine until every row has ended.

    Where rounds are CUDA graphs, a round is launched before the result of the one before is read, so that the device
    never waits for the host. A row that has ended thus takes part in one more round, whose result is dropped.
    """

    def __init__(
        self,
        engine: Engine,
        max_new_tokens: int,
        eos_ids: set[int],
        streamer: Streamer | None,
        stops: Stops | None = None,
    ) -> None:
        """max_new_tokens: per row."""
        self.engine = engine
        self.max_new_tokens = max_new_tokens
        self.eos_ids = eos_ids
        self.streamer = streamer
        self.stops = stops
        batch = len(engine.prompts)
        self.new_tokens: list[list[int]] = [[] for _ in range(batch)]
        """The new tokens of each row."""
        self.active = [True] * batch
        """Whether each row is unfinished."""
        self.device_active = torch.ones(batch, dtype=torch.bool, device=engine.root.device)
        """`active` on the device, bool [B]."""
        self.ahead = 1 if engine.runner.capturable else 0
        """Rounds that are launched before the result of the oldest one is read."""
        self._flights: deque[Flight] = deque()
        self.finite = True
        """Whether no row has met a fault, its end included; otherwise the caches can hold NaN."""
        self.stats = GenerationStats(row_rounds=[0] * batch, accepted_by_depth=[0] * engine.drafter.depth)

    def run(self, source: RoundSource) -> None:
        """Generate with the rounds of the engine's `source`. Raises UserError for logits that are NaN or infinite."""
        device = self.engine.prompts.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        if self.max_new_tokens > 1:
            source.prepare(self.stats)

        # The first token comes from prefill and counts for ttft_s only.
        start = time.perf_counter()
        first_tokens = self._prefill()
        self.stats.ttft_s = time.perf_counter() - start
        for row, token in enumerate(first_tokens):
            self._emit(row, [token], round_origins([]))

        start = time.perf_counter()
        if any(self.active):
            source.start(first_tokens)
            while any(self.active):
                if (parts := self.advance(source)) is not None:
                    source.observe(parts, self.active)
            source.finish(self.stats)
        self.stats.decode_s = time.perf_counter() - start

        if device.type == "cuda":
            self.stats.peak_memory_bytes = torch.cuda.max_memory_allocated(device)
        while self._flights:
            self._note(self._flights.popleft())  # it can have met a fault

    def advance(self, source: RoundSource) -> list[RowRound | None] | None:
        """Launch a round if any is needed, and take the result of the oldest one unless it was launched too recently.

        Returns the part of each row, None for inactive rows.
        """
        # A round emits a token or more in each active row.
        missing = [self.max_new_tokens - len(self.new_tokens[row]) for row, active in enumerate(self.active) if active]
        if is_needed := max(missing) > len(self._flights):
            self._flights.append(Flight(source.play(self.device_active), source.report))
        return self._note(self._flights.popleft()) if len(self._flights) > self.ahead or not is_needed else None

    def _prefill(self) -> list[int]:
        """Read the prompts. Returns the first token of each row."""
        first_tokens = with_released_memory(self.engine.runner.model, self.engine.prefill)
        tokens, faults = torch.stack([first_tokens, self.engine.cache.faults]).tolist()
        for row, fault in enumerate(faults):
            self._check_fault(row, fault)
        return tokens

    def _note(self, flight: Flight) -> list[RowRound | None]:
        """Take the result of a round: see `advance`."""
        parts: list[RowRound | None] = []
        for row, part in enumerate(flight.rows()):
            if not self.active[row]:
                self.finite &= not part.fault
                parts.append(None)
                continue
            self._check_fault(row, part.fault)
            emitted = self._emit(row, part.tokens, round_origins(part.from_lookup))
            self.stats.rounds += 1
            self.stats.row_rounds[row] += 1
            self.stats.decoded_tokens += emitted
            # The last token is the target's bonus token.
            for depth in range(min(emitted, len(part.tokens) - 1)):
                self.stats.accepted_by_depth[depth] += 1
            parts.append(part._replace(tokens=part.tokens[:emitted]))
        return parts

    def _check_fault(self, row: int, fault: int) -> None:
        """Raise UserError if `fault`, the row's entry in `TargetCache.faults`, is not 0."""
        if fault:
            position = self.engine.prompt_lengths[row] + len(self.new_tokens[row]) - 1
            temperature = self.engine.sampler.temperature_of(row)
            raise UserError(f"row {row}, {fault_message(fault, position, temperature)}")

    def _emit(self, row: int, tokens: Sequence[int], origins: Sequence[Origin]) -> int:
        """Append tokens to a row until it ends. Returns the number appended."""
        new_tokens = self.new_tokens[row]
        # All tokens are in the cache but the newest one.
        length = self.engine.prompt_lengths[row] + len(new_tokens) + len(tokens) - 1
        # Tokens that the round emitted after the row's end are dropped.
        for number, (token, origin) in enumerate(zip(tokens, origins, strict=True), start=1):
            new_tokens.append(token)
            self._stream(token, origin)
            is_last = len(new_tokens) == self.max_new_tokens or token in self.eos_ids
            if is_last or (self.stops is not None and self.stops(row, new_tokens)):
                self.active[row] = False
                self.device_active[row] = False
                # A round in flight may move the length on. Later rounds need the slots after it for their nodes.
                self.engine.cache.lengths[row] = length
                return number
        return len(tokens)

    def _stream(self, token: int, origin: Origin) -> None:
        if self.streamer is None:
            return
        if put_from := getattr(self.streamer, "put_from", None):
            put_from(torch.tensor([token]), origin)
        else:
            self.streamer.put(torch.tensor([token]))
