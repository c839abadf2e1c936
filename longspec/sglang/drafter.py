"""A round's draft: the tree from the root of each request, on tensors alone, so that it can be a CUDA graph."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspec.kernels.shared.residual import TokenSlots
from longspec.models.target_attention import QueryAttend
from longspec.sglang.draft_model import DraftModel
from longspec.sglang.prefix import PrefixAttention
from longspec.sglang.tree import Candidates, GrowingTree, expanded_nodes
from longspec.sglang.window import RoundWindow, WindowCache

if TYPE_CHECKING:
    from longspec.sglang.tree_kernels import KernelTree


class Drafter:
    """The draft of the requests that SGLang decodes."""

    def __init__(self, model: DraftModel, cache: WindowCache, prefix: PrefixAttention, topk: int) -> None:
        self.model = model
        self.cache = cache
        self.prefix = prefix
        self.topk = topk

    def propose(
        self, steps: int, nodes: int, roots: Tensor, requests: Tensor, lengths: Tensor, hidden: Tensor | None = None
    ) -> Candidates:
        """A tree of `steps` levels, of which `nodes` nodes are verified, the root included.

        roots, requests, lengths: LongTensor [B]; root b is at position lengths[b], and the target has read all tokens
        before it. hidden: the target's last hidden states [B, hidden] at the positions before the roots.
        """
        tree = self._tree(len(roots), steps, roots.device)
        window = RoundWindow(self.cache, requests, lengths, expanded_nodes(self.topk, steps))
        attention = self.prefix.plan(requests, lengths)
        cross_attends = [partial(attention, layer) for layer in self.model.layers]
        columns = self.model.columns(requests)
        feature = self.model.feature(hidden)
        positions = self._level_positions(lengths, steps)
        tokens = roots[:, None]
        for level in range(steps):
            self_attend = self._window_attention(window, lengths, level, tree.visible)
            at = positions[level][:, : tokens.shape[1]]
            slots = window.token_slots(tree.first, at, self.model.rope)
            states = self.model.level(tokens, slots, self_attend, cross_attends, feature)
            tokens = tree.grow(*columns.best(states, self.topk))
        return tree.candidates(nodes)

    def _tree(self, batch: int, steps: int, device: torch.device) -> GrowingTree | KernelTree:
        if device.type == "cuda":
            from longspec.sglang.tree_kernels import KernelTree, fits  # imports triton, which a CPU may lack

            if fits(self.topk, steps):
                return KernelTree(batch, self.topk, steps, device)
        return GrowingTree(batch, self.topk, steps, device)

    def _level_positions(self, lengths: Tensor, steps: int) -> Tensor:
        """The positions of all levels' nodes, LongTensor [steps, B, k]; the root takes the first of its level."""
        levels = torch.arange(steps, device=lengths.device)
        positions = self.model.in_table(lengths + levels[:, None])
        return positions[..., None].expand(-1, -1, self.topk).contiguous()

    def _window_attention(self, window: RoundWindow, lengths: Tensor, level: int, visible: Tensor) -> QueryAttend:
        attend = self.model.backend.attention.window
        return lambda q: attend(q, window.keys, window.values, lengths, level, visible, q.shape[3] ** -0.5)

    def store(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store the draft's keys of tokens that the target has read; none in a negative slot. All LongTensor [T]."""
        at = self.model.in_table(positions[None])
        own = TokenSlots(at, self.model.rope, *self.cache.as_row, slots[None])
        self.model.store_keys_values(tokens[None], own)

    def store_accepted(self, tokens: Tensor, requests: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        """Store the draft's keys of a round's accepted path.

        tokens: LongTensor [B, T], the root and the tokens after it; of row b the first accepted[b] are stored, at the
        positions from lengths[b] on. requests, lengths: LongTensor [B], as before the round.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = lengths[:, None] + steps
        slots = self.cache.slots(requests, positions).where(steps < accepted[:, None], -1)
        self.store(tokens.flatten(), positions.flatten(), slots.flatten())


def prefill_positions(prefix_lens: list[int], extend_lens: list[int]) -> Tensor:
    """The positions of a prefill's tokens, LongTensor [T] on the CPU: each request's continue its cached prefix."""
    starts, lens = torch.tensor(prefix_lens), torch.tensor(extend_lens)
    first_rows = lens.cumsum(0) - lens
    return torch.arange(int(lens.sum())) + (starts - first_rows).repeat_interleave(lens)
