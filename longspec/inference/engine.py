"""The engine: chunked prefill, then rounds of draft → verify → accept → compact, the same for every method."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler, accept
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal, chain
from longspec.inference.runner import Runner

PREFILL_TOKENS = 4096
"""Tokens of the prompts, over all rows, that one pass of prefill reads."""
CAPACITY_STEP = 256

Round = Callable[[Tensor], tuple[Tensor, Tensor]]
"""As `Engine.round`."""


class Engine:
    """Decodes a ragged batch; row b's newest token, the root, is the only one that the target has not read.

    Its state lies in tensors that every round changes in place, so that a round can be captured and replayed.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        sampler: Sampler,
        prompts: Tensor,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """prompts: LongTensor [B, P], padded right; prompt_lengths: their real lengths, each at least 1."""
        self.runner, self.drafter, self.sampler = runner, drafter, sampler
        self.prompts, self.prompt_lengths = prompts, list(prompt_lengths)
        # A row grows by depth + 1 at most past its last token, and a round's nodes lie behind that.
        needed = prompts.shape[1] + max_new_tokens + drafter.depth + 1 + drafter.nodes
        capacity = -(-needed // CAPACITY_STEP) * CAPACITY_STEP
        self.cache = TargetCache(runner.config, len(prompts), capacity, runner.dtype, runner.device)
        self.root = prompts[:, 0].clone()
        runner.prepare(capacity)

    @property
    def kind(self) -> Hashable:
        """Engines of one kind launch the same kernels in a round."""
        sampler, runner = self.sampler, self.runner
        # Attention goes by the cache's size, up to some 128 splits of it.
        size = min(self.cache.keys.shape[3] // CAPACITY_STEP, 128)
        return (
            self.drafter.kind,
            len(self.root),
            size,
            sampler.greedy,
            tuple(type(warper) for warper in sampler.warpers) if sampler.cuts else (),
            runner.dtype,
            runner.attention.name,
        )

    def prefill(self) -> Tensor:
        """Read the prompts and choose each row's first token, LongTensor [B]: the first root."""
        lengths = torch.tensor(self.prompt_lengths, device=self.prompts.device)
        last_hidden = self._read_prompts()
        self.cache.lengths.copy_(lengths)
        if self.drafter.reads_hidden:
            self.cache.newest_hidden.copy_(last_hidden)
        self.drafter.start(self.prompts, lengths)
        self.cache.faults.zero_()
        logits = self.runner.logits(last_hidden)[:, 0]
        self.root.copy_(self.sampler.choose(logits, self.cache.watch(Fault.TARGET)))
        return self.root.clone()

    def _read_prompts(self) -> Tensor:
        """Fill the cache chunk by chunk; the hidden state [B, 1, hidden] of each row's last token."""
        batch, longest = self.prompts.shape
        chunk = max(1, PREFILL_TOKENS // batch)
        last: list[Tensor] = [torch.empty(0)] * batch
        for start in range(0, longest, chunk):
            end = min(start + chunk, longest)
            self.cache.slots = torch.arange(start, end, device=self.prompts.device).expand(batch, -1)

            def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, end: int = end) -> Tensor:
                return self.runner.attention.prefill(q, k[:, :, :end], v[:, :, :end], scale)

            hidden = self.runner.target(self.prompts[:, start:end], self.cache.slots, self.cache, attend)
            for row, length in enumerate(self.prompt_lengths):
                if start < length <= end:
                    last[row] = hidden[row, length - 1 - start].clone()
        return torch.stack(last)[:, None]

    def go_to(self, lengths: Tensor, root: Tensor) -> None:
        """Decode on from other places in what was read: after `lengths`, LongTensor [B], tokens of the prompts, each at
        least 1, with `root`, LongTensor [B], as the next one."""
        self.root.copy_(root)
        if self.drafter.reads_hidden:
            self.cache.lengths.copy_(lengths - 1)
            newest = self.prompts.gather(1, lengths[:, None] - 1)
            self.cache.newest_hidden.copy_(self.read_tree(chain(newest)))
        self.cache.lengths.copy_(lengths)
        self.drafter.start(self.prompts, lengths)

    def round(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """One round. active: bool [B]; the other rows stay as they are.

        Returns the emitted tokens, LongTensor [B, depth + 1], and how many of them count, LongTensor [B] (0 for a
        row that is not active): the accepted draft tokens, then the bonus token. They mean nothing for a row that
        has a fault in `cache.faults`.
        """
        proposal = self.drafter.propose(self.root, self.cache)
        hidden = self.read_tree(proposal)
        logits = self.runner.logits(hidden)
        accepted = accept(proposal, logits, self.sampler, self.cache.watch(Fault.TARGET))
        if self.drafter.reads_hidden:
            last = accepted.path.gather(1, accepted.count[:, None])[..., None]
            newest = hidden.gather(1, last.expand(-1, -1, hidden.shape[2]))
            self.cache.newest_hidden.copy_(torch.where(active[:, None, None], newest, self.cache.newest_hidden))
        count = torch.where(active, accepted.count + 1, 0)
        path_tokens = proposal.tokens.gather(1, accepted.path)
        steps = torch.arange(proposal.depth + 1, device=count.device)
        self.drafter.feed(path_tokens, self.cache.lengths[:, None] + steps, steps < count[:, None])
        self.cache.keep(accepted.path, count)
        self.root.copy_(torch.where(active, accepted.bonus, self.root))
        emitted = path_tokens.roll(-1, dims=1).scatter(1, accepted.count[:, None], accepted.bonus[:, None])
        return emitted, count

    def verify(self, proposal: Proposal) -> Tensor:
        """The target's logits [B, N, V] at every node of the tree."""
        return self.runner.logits(self.read_tree(proposal))

    def read_tree(self, proposal: Proposal) -> Tensor:
        """The target's hidden states [B, N, hidden] at every node of the tree, in one pass; its KV lies behind the
        cache's accepted tokens until `TargetCache.keep` takes the accepted part."""
        cache = self.cache
        cache.slots = cache.next_slots(proposal.tokens.shape[1])
        positions = cache.lengths[:, None] + proposal.levels
        attend = self.runner.attention.hybrid(cache.lengths, proposal.visible)
        return self.runner.target(proposal.tokens, positions, cache, attend)
