"""The engine: chunked prefill, then rounds of draft → verify → accept → compact, the same for every method."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler, accept
from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.kernels.attention import hybrid_attention, prefill_attention
from longspec.models.glide import GlideMixin
from longspec.models.target_attention import run_backbone

PREFILL_CHUNK = 2048


class Engine:
    """Decodes a ragged batch; row b's newest token, the root, is the only one that the target has not read."""

    def __init__(
        self,
        model: GlideMixin,
        drafter: Drafter,
        sampler: Sampler,
        prompts: Tensor,
        prompt_lengths: Sequence[int],
        max_new_tokens: int,
    ) -> None:
        """prompts: LongTensor [B, P], padded right; prompt_lengths: their real lengths, each at least 1."""
        self.model, self.drafter, self.sampler = model, drafter, sampler
        self.prompts = prompts
        self.host_lengths = list(prompt_lengths)
        weight = model.lm_head.weight
        # A row grows by depth + 1 at most past its last token, and a round's nodes lie behind that.
        capacity = prompts.shape[1] + max_new_tokens + drafter.depth + 1 + drafter.nodes
        self.cache = TargetCache(model.config, len(prompts), capacity, weight.dtype, weight.device)
        self.root = prompts[:, 0]

    def prefill(self) -> Tensor:
        """Read the prompts and choose each row's first token, LongTensor [B]: the first root."""
        lengths = torch.tensor(self.host_lengths, device=self.prompts.device)
        last_hidden = self._read_prompts(lengths)
        self.cache.lengths.copy_(lengths)
        self.cache.max_length = max(self.host_lengths)
        self.drafter.start(self.prompts, lengths)
        self.root = self.sampler.choose(self.model.lm_head(last_hidden))
        return self.root

    def _read_prompts(self, lengths: Tensor) -> Tensor:
        """Fill the cache chunk by chunk; the hidden state [B, hidden] of each row's last token."""
        batch, longest = self.prompts.shape
        last = torch.empty(
            batch, self.model.config.hidden_size, dtype=self.cache.keys.dtype, device=self.prompts.device
        )
        for start in range(0, longest, PREFILL_CHUNK):
            end = min(start + PREFILL_CHUNK, longest)
            self.cache.slots = torch.arange(start, end, device=lengths.device).expand(batch, -1)

            def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, end: int = end) -> Tensor:
                return prefill_attention(q, k[:, :, :end], v[:, :, :end], scale)

            hidden = run_backbone(self.model.model, self.prompts[:, start:end], self.cache.slots, self.cache, attend)
            rows = ((lengths > start) & (lengths <= end)).nonzero()[:, 0]
            last[rows] = hidden[rows, lengths[rows] - 1 - start]
        return last

    def round(self, active: Tensor) -> tuple[Tensor, Tensor]:
        """One round. active: bool [B]; the other rows stay as they are.

        Returns the emitted tokens, LongTensor [B, depth + 1], and how many of them count, LongTensor [B] (0 for a
        row that is not active): the accepted draft tokens, then the bonus token.
        """
        proposal = self.drafter.propose(self.root, self.cache)
        accepted = accept(proposal, self.verify(proposal), self.sampler)
        count = torch.where(active, accepted.count + 1, 0)
        path_tokens = proposal.tokens.gather(1, accepted.path)
        first_position = self.cache.lengths[:, None]
        steps = torch.arange(proposal.depth + 1, device=count.device)
        self.drafter.feed(path_tokens, first_position + steps, steps < count[:, None])
        self.cache.keep(accepted.path, count)
        self.root = torch.where(active, accepted.bonus, self.root)
        emitted = path_tokens.roll(-1, dims=1).scatter(1, accepted.count[:, None], accepted.bonus[:, None])
        return emitted, count

    def verify(self, proposal: Proposal) -> Tensor:
        """The target's logits [B, N, V] at every node of the tree, in one pass; its KV lies behind the cache's
        accepted tokens until `TargetCache.keep` takes the accepted part."""
        cache = self.cache
        cache.slots = cache.next_slots(proposal.tokens.shape[1])
        positions = cache.lengths[:, None] + proposal.levels

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return hybrid_attention(q, k, v, cache.lengths, proposal.visible, scale, cache.max_length)

        hidden = run_backbone(self.model.model, proposal.tokens, positions, cache, attend)
        return self.model.lm_head(hidden)

    def note_lengths(self, counts: Sequence[int]) -> None:
        """Tell the host how far the last round went: `counts` as `round` returned them."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]
        self.cache.max_length = max(self.host_lengths)
