"""Sampling from a target at high throughput: large batches of prompts of similar length, without a draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.capture import CapturedRound, warm_up
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.engine import Engine
from longspec.inference.kernel_key import CAPACITY_STEP
from longspec.inference.memory import slot_bytes
from longspec.inference.request import Sampling
from longspec.inference.sampling import RowSettings, Sampler, sampling_kind
from longspec.inference.select_runner import make_runner
from longspec.models.glide import GlideMixin

REFILL_SHARE = 4
"""While other requests wait, a batch ends when 1 / REFILL_SHARE of its rows are left; these join a later batch."""
STEPS_PER_CHECK = 16
"""Number of steps on a CUDA device between two checks of the host, each of which waits for the device."""
MEMORY_SHARE = 0.8
"""Share of a CUDA device's memory for weights and KV cache."""
CPU_CACHE_BYTES = 4 << 30
"""Size of the KV cache on a CPU."""

UNUSED = -1
"""Entry for a row that has ended."""
FAULTY = -2
"""Entry for a token whose logits are NaN or infinite."""

Progress = Callable[[int, int], None]
"""Called with the number of new tokens and of finished requests since the last call."""


@dataclass
class Request:
    """A prompt and its answer so far."""

    prompt: list[int]
    temperature: float
    max_new_tokens: int
    answer: list[int]
    seed: int = 0
    """Set by the answerer."""

    @property
    def prefix_length(self) -> int:
        """Number of tokens that the target has to read before it continues the answer."""
        return len(self.prompt) + len(self.answer)

    @property
    def remaining(self) -> int:
        """Number of tokens that the answer may still get."""
        return self.max_new_tokens - len(self.answer)


class Answerer:
    """Answers many prompts with one target."""

    def __init__(self, model: GlideMixin, batch_size: int) -> None:
        """batch_size: largest number of rows in a batch; batches of long prompts have as many as fit into memory."""
        self.runner = make_runner(model, "auto", True)
        self.device = self.runner.device
        self.batch_size = batch_size
        self.slot_bytes = slot_bytes(model.config, self.runner.dtype)
        self.cache_bytes = _cache_bytes(model, self.device)

    @torch.no_grad()
    def answer(
        self, requests: Sequence[Request], stop_ids: Sequence[int], seed: int, progress: Progress = lambda *_: None
    ) -> None:
        """Complete the answers in place, each up to and including its first stop id, or up to its limit.

        The same requests and seed give the same answers on the same kind of device. A row that its batch
        did not finish continues in a later batch, with the answer so far as part of its prompt. Raises UserError, with
        the request and the position, for logits that are NaN or infinite.
        """
        for number, request in enumerate(requests):
            request.seed = (seed + number) % 2**64
        stops = torch.tensor(list(stop_ids), dtype=torch.long, device=self.device)
        waiting = [request for request in requests if request.remaining > 0]
        with torch.cuda.device_of(self.runner.model.lm_head.weight):
            while waiting:
                # Rows of similar length waste little memory and little attention on padding.
                waiting.sort(key=lambda request: request.prefix_length, reverse=True)
                rows = self._rows(waiting)
                batch = waiting[:rows]
                waiting = waiting[rows:]
                most_unfinished = len(batch) // REFILL_SHARE if waiting else 0
                waiting += self._run(batch, stops, most_unfinished, progress)
                _check_faults(requests)

    def _rows(self, waiting: Sequence[Request]) -> int:
        """Number of rows in the next batch: as many as fit into memory with the length of the first one."""
        longest_rest = max(request.remaining for request in waiting[: self.batch_size])
        # Sorted by length, so the first row has the longest prefix.
        slots = waiting[0].prefix_length + longest_rest + CAPACITY_STEP
        return max(1, min(self.batch_size, self.cache_bytes // (slots * self.slot_bytes)))

    def _run(self, batch: list[Request], stops: Tensor, most_unfinished: int, progress: Progress) -> list[Request]:
        """Extend a batch's answers until at most `most_unfinished` rows are unfinished. Returns these rows."""
        steps = max(request.remaining for request in batch)
        limits = torch.tensor([request.remaining for request in batch], device=self.device)
        engine = self._engine(batch, steps)
        # Compiles kernels before the graph is captured.
        if self.runner.capturable:
            warm_up(engine)
        newest = engine.prefill()
        play_round = CapturedRound(engine) if self.runner.capturable and steps > 1 else engine.round

        tokens = torch.full((len(batch), steps), UNUSED, dtype=torch.long, device=self.device)
        active = torch.ones_like(newest, dtype=torch.bool)
        reported_tokens = 0
        reported_rows = 0
        for step in range(steps):
            if step > 0:
                emitted = play_round(active).tokens
                newest = emitted[:, 0]
            # Kept on the device as a marker, because reading it would wait for every step.
            newest = torch.where(engine.cache.faults > 0, FAULTY, newest)
            tokens[:, step] = torch.where(active, newest, UNUSED)
            # A stop token is part of the answer and ends its row.
            active = active & ~torch.isin(newest, stops) & (limits > step + 1)

            # Reading these counts waits for the device, so on CUDA it happens only every few steps.
            is_last = step == steps - 1
            if self.device.type == "cpu" or step % STEPS_PER_CHECK == STEPS_PER_CHECK - 1 or is_last:
                written = (tokens[:, : step + 1] >= 0).sum()
                faulty = (tokens == FAULTY).sum()
                unfinished_rows, written_tokens, faults = torch.stack([active.sum(), written, faulty]).tolist()
                finished_rows = len(batch) - unfinished_rows
                progress(written_tokens - reported_tokens, finished_rows - reported_rows)
                reported_tokens = written_tokens
                reported_rows = finished_rows
                # A few long answers would otherwise run alone in a large batch.
                if unfinished_rows <= most_unfinished or faults:
                    break

        for request, row in zip(batch, tokens.tolist(), strict=True):
            request.answer += [token for token in row if token != UNUSED]
        return [request for request, is_active in zip(batch, active.tolist(), strict=True) if is_active]

    def _engine(self, batch: list[Request], steps: int) -> Engine:
        """An engine that decodes `steps` tokens per row without a draft."""
        rows = [torch.tensor(request.prompt + request.answer) for request in batch]
        prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        samplings = [Sampling(request.temperature) for request in batch]
        settings = RowSettings.allocate(len(batch), self.device)
        settings.assign(slice(0, len(batch)), samplings, [request.seed for request in batch])
        sampler = Sampler(sampling_kind(samplings), settings)
        return Engine(self.runner, NoDraft(), sampler, prompts, [len(row) for row in rows], steps)


def _check_faults(requests: Sequence[Request]) -> None:
    """Raise UserError for the first request with a token whose logits were NaN or infinite."""
    for number, request in enumerate(requests):
        # The logits of a token come from the position before it.
        if FAULTY in request.answer:
            position = len(request.prompt) + request.answer.index(FAULTY) - 1
            raise UserError(
                f"prompt {number}, position {position}: the target's logits are NaN or infinite at temperature "
                f"{request.temperature:g}; check its weights and its dtype"
            )


def _cache_bytes(model: GlideMixin, device: torch.device) -> int:
    """Size of the KV cache. It follows from the device's total memory, not the free memory, so runs are repeatable."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory) - weights
