"""One batch of prompts without requests, for teacher-forced rounds and measurements of single ones."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Drafter
from longspec.inference.engine.prefill import PREFILL_TOKENS, DraftStarter, PromptReader
from longspec.inference.engine.rounds import Rounds
from longspec.inference.memory import slots_for
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler


class StaticBatch(Rounds):
    """The rounds of a ragged batch of prompts, with caches of its own."""

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampler: Sampler,
        prompts: Tensor,
        lengths: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """Allocate the caches. prompts: LongTensor [B, P], padded on the right, with `lengths` real tokens."""
        self.prompts = prompts
        self.prompt_lengths = list(lengths)
        capacity = slots_for(prompts.shape[1] + max_new_tokens, drafter.depth, drafter.nodes)
        cache = TargetCache(runner.config, len(prompts), capacity, runner.dtype, runner.device, sampler.positions)
        super().__init__(runner, drafter, sampler.on(runner.backend), cache, prompts[:, 0].clone())
        runner.prepare(capacity)
        drafter.reserve(capacity)

    def prefill(self) -> Tensor:
        """Read the prompts and choose the first token of each row, LongTensor [B], which becomes its root."""
        starter = DraftStarter(self.drafter, len(self.root), self.capacity, self.sampler, self.root.device)
        reader, ends = PromptReader(self.runner, self.cache, 1, starter), []
        for row, length in enumerate(self.prompt_lengths):
            own = slice(row, row + 1)
            for start in range(0, length, PREFILL_TOKENS):
                end = min(start + PREFILL_TOKENS, length)
                hidden = reader.read(own, self.prompts[own, start:end], start, [end])
            ends.append(hidden)
        last_hidden = torch.cat(ends)
        if self.drafter.reads_hidden:
            self.cache.newest_hidden.copy_(last_hidden)
        self.drafter.start(self.prompts, self.cache.lengths.long())
        self.cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        watch = self.cache.watch(Fault.TARGET)
        self.root.copy_(self.sampler.first_tokens(logits, self.prompts, self.prompt_lengths, watch))
        return self.root.clone()
