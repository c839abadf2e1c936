"""An engine for one batch of prompts: prefill, then rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine.kernel_key import CAPACITY_STEP
from longspec.inference.engine.prefill import LEAST_PREFILL_TOKENS, PREFILL_TOKENS, PromptReader, joined_rows
from longspec.inference.engine.rounds import Rounds
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler


class Engine(Rounds):
    """Decodes a ragged batch of prompts: prefill, then rounds."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampler: Sampler,
        prompts: Tensor,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """Allocate the caches of a batch. `prefill` reads the prompts.

        prompts: LongTensor [B, P], padded on the right. prompt_lengths: tokens per row without padding, at least 1.
        max_new_tokens: per row; the cache has room for them.
        """
        self.prompts = prompts
        self.prompt_lengths = list(prompt_lengths)

        # A row's last round can take it up to depth + 1 tokens past its limit. The nodes of a tree are stored after the
        # accepted tokens.
        slots = prompts.shape[1] + max_new_tokens + drafter.depth + 1 + drafter.nodes
        capacity = -(-slots // CAPACITY_STEP) * CAPACITY_STEP
        positions = sampler.settings.positions if sampler.has_settings else None
        sampler.reserve(capacity)
        cache = TargetCache(runner.config, len(prompts), capacity, runner.dtype, runner.device, positions)
        super().__init__(runner, drafter, sampler, cache, prompts[:, 0].clone())
        runner.prepare(capacity)
        drafter.reserve(capacity)

    def prefill(self) -> Tensor:
        """Read the prompts and choose the first token of each row, LongTensor [B], which becomes its root."""
        lengths = torch.tensor(self.prompt_lengths, device=self.prompts.device)
        last_hidden = self._read_prompts()

        self.cache.lengths.copy_(lengths)
        if self.drafter.reads_hidden:
            self.cache.newest_hidden.copy_(last_hidden)
        self.drafter.start(self.prompts, lengths)

        self.cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        watch = self.cache.watch(Fault.TARGET)
        self.root.copy_(self.sampler.first_tokens(logits, self.prompts, self.prompt_lengths, watch))
        self.cache.compare_ranks(self.root[:, None], torch.ones_like(self.root))
        return self.root.clone()

    def _read_prompts(self) -> Tensor:
        """Fill the cache group by group, each chunk by chunk.

        Returns the hidden state [B, 1, hidden] at the last token of each row.
        """
        last_hidden: list[Tensor] = [torch.empty(0)] * len(self.prompts)
        reader = PromptReader(self.runner, self.cache, 1)
        lengths = self.prompt_lengths
        waiting = [(rows, 0) for rows in self._unread(0)]
        while waiting:
            rows, start = waiting.pop()
            end = min(start + PREFILL_TOKENS // (rows.stop - rows.start), max(lengths[rows]))
            ends = [min(length, end) for length in lengths[rows]]
            hidden = reader.read(rows, self.prompts[rows, start:end], start, ends)
            for row in range(rows.start, rows.stop):
                if start < lengths[row] <= end:
                    last_hidden[row] = hidden[row - rows.start].clone()
            waiting += [(unread, end) for unread in self._unread(end, rows)]
        return torch.stack(last_hidden)

    def _unread(self, start: int, within: slice = slice(None)) -> list[slice]:
        """Groups of rows with prompt tokens from position `start` on. A pass reads one group."""
        rows = range(*within.indices(len(self.prompts)))
        unread = [(row, self.prompt_lengths[row] - start) for row in rows if self.prompt_lengths[row] > start]
        return joined_rows(unread, PREFILL_TOKENS, LEAST_PREFILL_TOKENS)
