"""Sampling from a target at high throughput: large batches sorted by length, without waiting for the last rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from longspec.errors import UserError
from longspec.inference.capture import capture_round, warm_up
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.engine import CAPACITY_STEP, Engine
from longspec.inference.sampling import Sampler
from longspec.inference.select_runner import make_runner
from longspec.models.draft_layer import head_dim
from longspec.models.glide import GlideMixin

REFILL_SHARE = 4
"""A batch ends when a quarter of its rows are left and others wait; the rest joins a later batch."""
LOOK_EVERY = 16
"""Steps between two looks of the host at a CUDA device."""
MEMORY_SHARE, CPU_CACHE_BYTES = 0.8, 4 << 30
"""Share of a CUDA device's memory for weights and KV cache; bytes of the KV cache on a CPU."""

UNUSED, FAULTY = -1, -2
"""Stand for a token: a row that has ended, and logits that are NaN or infinite."""

Progress = Callable[[int, int], None]
"""Called with the number of new tokens and of finished requests since the last call."""


@dataclass
class Request:
    """A prompt and its answer so far."""

    prompt: list[int]
    temperature: float
    max_new_tokens: int
    answer: list[int]

    @property
    def read(self) -> int:
        """Tokens that the target reads before it goes on."""
        return len(self.prompt) + len(self.answer)

    @property
    def left(self) -> int:
        return self.max_new_tokens - len(self.answer)


class RowTemperatures(LogitsProcessor):
    """A temperature for each row; at 0 all of the probability is on the argmax."""

    def __init__(self, temperatures: Tensor) -> None:
        """temperatures: [B], fp32."""
        self.greedy = (temperatures == 0)[:, None]
        self.divisors = torch.where(temperatures == 0, 1.0, temperatures)[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        best = scores.argmax(-1, keepdim=True)
        # The best logit keeps its value, because NaN and infinity must reach the watch.
        certain = torch.full_like(scores, -torch.inf).scatter(-1, best, scores.gather(-1, best))
        return torch.where(self.greedy, certain, scores / self.divisors)


def row_sampler(temperatures: Tensor, generator: torch.Generator) -> Sampler:
    """A sampler for one node per row, each row at its own temperature."""
    if not temperatures.any():
        return Sampler(0.0, 0, 1.0, generator)
    sampler = Sampler(1.0, 0, 1.0, generator)
    sampler.warpers.append(RowTemperatures(temperatures))
    sampler.truncates = True
    return sampler


class Answerer:
    """Answers many prompts with one target, without a draft."""

    def __init__(self, model: GlideMixin, batch_size: int) -> None:
        """batch_size: most rows of a batch; long prompts get as many as their KV cache has memory for."""
        self.runner = make_runner(model, "auto", True)
        self.device, self.batch_size = self.runner.device, batch_size
        config = model.config
        values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config)
        self.slot_bytes = values * self.runner.dtype.itemsize
        self.cache_bytes = _cache_bytes(model, self.device)

    @torch.no_grad()
    def answer(
        self, requests: Sequence[Request], stop_ids: Sequence[int], seed: int, progress: Progress = lambda *_: None
    ) -> None:
        """Complete the answers in place, each up to and with its first stop id, or to its limit.

        The same requests, seed and batch size give the same answers on the same kind of device. A row that a full
        batch leaves behind goes on with its answer so far as part of its prompt. Raises UserError, with the request
        and the position, for logits that are NaN or infinite.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        stops = torch.tensor(list(stop_ids), dtype=torch.long, device=self.device)
        waiting = [request for request in requests if request.left > 0]
        with torch.cuda.device_of(self.runner.model.lm_head.weight):
            while waiting:
                waiting.sort(key=lambda request: request.read, reverse=True)
                rows = self._rows(waiting)
                batch, waiting = waiting[:rows], waiting[rows:]
                few = len(batch) // REFILL_SHARE if waiting else 0
                waiting += self._run(batch, stops, few, generator, progress)
                if faulty := [row for row, request in enumerate(requests) if FAULTY in request.answer]:
                    raise _fault(faulty[0], requests[faulty[0]])

    def _rows(self, waiting: Sequence[Request]) -> int:
        """Rows of the next batch: as many as there is memory for, at the first one's length."""
        slots = waiting[0].read + max(request.left for request in waiting[: self.batch_size]) + CAPACITY_STEP
        return max(1, min(self.batch_size, self.cache_bytes // (slots * self.slot_bytes)))

    def _run(
        self, batch: list[Request], stops: Tensor, few: int, generator: torch.Generator, progress: Progress
    ) -> list[Request]:
        """Extend a batch's answers until at most `few` rows go on; those rows."""
        rows = [torch.tensor(request.prompt + request.answer) for request in batch]
        prompts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)
        limits = torch.tensor([request.left for request in batch], device=self.device)
        steps = max(request.left for request in batch)
        temperatures = torch.tensor([request.temperature for request in batch], device=self.device)
        sampler = row_sampler(temperatures, generator)
        engine = Engine(self.runner, NoDraft(), sampler, prompts, [len(row) for row in rows], steps)
        tokens = torch.full((len(batch), steps), UNUSED, dtype=torch.long, device=self.device)
        if self.runner.capturable:
            warm_up(engine)
        newest = engine.prefill()
        play = capture_round(engine) if self.runner.capturable and steps > 1 else engine.round
        active, reported = torch.ones_like(newest, dtype=torch.bool), (0, 0)
        for step in range(steps):
            if step:
                newest = play(active)[0][:, 0]
            newest = torch.where(engine.cache.faults > 0, FAULTY, newest)
            tokens[:, step] = torch.where(active, newest, UNUSED)
            active = active & ~torch.isin(newest, stops) & (limits > step + 1)
            if self.device.type == "cpu" or step % LOOK_EVERY == LOOK_EVERY - 1 or step == steps - 1:
                counts = (active.sum(), (tokens[:, : step + 1] >= 0).sum(), (tokens == FAULTY).sum())
                going, written, faulty = torch.stack(counts).tolist()
                progress(written - reported[0], len(batch) - going - reported[1])
                reported = written, len(batch) - going
                if going <= few or faulty:
                    break
        for request, row in zip(batch, tokens.tolist(), strict=True):
            request.answer += [token for token in row if token != UNUSED]
        return [request for request, going_on in zip(batch, active.tolist(), strict=True) if going_on]


def _fault(row: int, request: Request) -> UserError:
    position = len(request.prompt) + request.answer.index(FAULTY) - 1
    return UserError(
        f"prompt {row}, position {position}: the target's logits are NaN or infinite at temperature "
        f"{request.temperature:g}; check its weights and its dtype"
    )


def _cache_bytes(model: GlideMixin, device: torch.device) -> int:
    """Bytes for the KV cache: from the device's size, not from what is free, so that runs can be repeated."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory) - weights
