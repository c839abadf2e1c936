"""A round's draft: the tree from the root of each request, on tensors alone, so that it can be a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix
from longspec.kernels.shared.residual import TokenSlots
from longspec.kernels.shared.tree import Tree, new_tree
from longspec.sglang.draft_model import DraftModel
from longspec.sglang.window import WindowCache

PagedAttend = Callable[[Tensor, PagedPrefix, Tensor], None]
"""(q [B, H, n, D], prefix, out [B, n, H, D]): see `sglang.paged.PagedAttention`."""


class DraftTree(NamedTuple):
    """The N verified nodes of each request; parents precede their children."""

    tokens: Tensor
    """LongTensor [B, N], the root first."""
    parents: Tensor
    """LongTensor [B, N]: -1 for the root and for padding."""


class Growth(NamedTuple):
    """Tensors in which the trees of all rounds of one shape grow."""

    tree: Tree
    levels: Tensor
    """LongTensor [M]: the depth of each node."""
    slots: list[Tensor]
    """LongTensor [B, n] per level that the draft reads: its nodes' slots in the round's window."""


class Drafter:
    """The draft of the requests that SGLang decodes."""

    def __init__(self, model: DraftModel, cache: WindowCache, pool: Any, attend: PagedAttend) -> None:
        """pool: SGLang's KV pool of the target, whose buffers stay where they are. attend: attention to it."""
        self.model, self.cache, self.pool, self.attend = model, cache, pool, attend
        self.growths: dict[tuple[int, tuple[int, ...]], Growth] = {}
        """By batch size and shape."""

    def propose(
        self,
        shape: tuple[int, ...],
        nodes: int,
        roots: Tensor,
        requests: Tensor,
        lengths: Tensor,
        hidden: Tensor | None = None,
    ) -> DraftTree:
        """The best `nodes` nodes, the root included, of a tree with shape[i] nodes in level i + 1.

        roots, requests, lengths: LongTensor [B]; root b is at position lengths[b], and the target has read all tokens
        before it. hidden: the target's last hidden states [B, hidden] at the positions before the roots.
        """
        model = self.model
        tree, levels, slots = self._growth(len(roots), shape)
        tree.tokens[:, 0] = roots
        keys, values = self.cache.round(requests, lengths, len(levels))
        cross_attends = self._cross_attends(requests, lengths)
        ids, logits = model.columns(requests)
        feature = model.feature(hidden)
        positions = model.in_table(lengths + torch.arange(len(shape), device=lengths.device)[:, None])
        scale = keys.shape[3] ** -0.5
        above = slice(0, 1)
        for level, width in enumerate(shape):
            tokens, visible = tree.tokens[:, above], tree.visible[:, above]

            def self_attend(q: Tensor, level: int = level, visible: Tensor = visible) -> Tensor:
                return model.backend.attention.window(q, keys, values, lengths, level, visible, scale)

            at = positions[level][:, None].expand_as(tokens).contiguous()
            own = TokenSlots(at, model.rope, keys, values, slots[level])
            stream = model.stream(tokens)
            model.layer.add_to(stream, own, self_attend, cross_attends, feature)
            model.backend.grow_level(tree, above, width, logits(stream.hidden), None, ids=ids)
            above = slice(above.stop, above.stop + width)
        selected = model.backend.select_nodes(tree, levels, nodes, by_arrival=False)
        return DraftTree(selected.tokens, selected.parents)

    def _growth(self, batch: int, shape: tuple[int, ...]) -> Growth:
        if (batch, shape) not in self.growths:
            device = self.cache.keys.device
            widths = torch.tensor([1, *shape])
            levels = torch.arange(len(widths)).repeat_interleave(widths).to(device)
            numbers = self.cache.window + torch.arange(len(levels), device=device).expand(batch, -1)
            slots = [part.contiguous() for part in numbers.split(widths.tolist(), 1)[:-1]]
            self.growths[batch, shape] = Growth(new_tree(batch, len(levels), False, device), levels, slots)
        return self.growths[batch, shape]

    def _cross_attends(self, requests: Tensor, lengths: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """Attention to the first `lengths` positions of requests in each layer of the target that the draft reads."""
        table = self.cache.req_to_token
        begins = requests * table.shape[1]
        ends = begins + lengths

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
            pools = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            self.attend(q, PagedPrefix(*pools, table.view(-1), begins, ends), out)
            return out.transpose(1, 2)

        return [partial(attend, layer) for layer in self.model.layers]

    def store(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store the draft's keys of tokens that the target has read; none in a negative slot. All LongTensor [T]."""
        at = self.model.in_table(positions[None])
        own = TokenSlots(at, self.model.rope, *self.cache.as_row, slots[None])
        self.model.layer.store_keys_values(self.model.stream(tokens[None]), own)

    def store_accepted(self, tokens: Tensor, requests: Tensor, lengths: Tensor, accepted: Tensor) -> None:
        """Store the draft's keys of a round's accepted path.

        tokens: LongTensor [B, T], the root and the tokens after it; of row b the first accepted[b] are stored, at the
        positions from lengths[b] on. requests, lengths: LongTensor [B], as before the round.
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = lengths[:, None] + steps
        slots = self.cache.slots(requests, positions).where(steps < accepted[:, None], -1)
        self.store(tokens.flatten(), positions.flatten(), slots.flatten())


def candidates(parents: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A tree in the numbers of SGLang's `build_tree_kernel_efficient`, called with N children per node.

    parents: see `DraftTree`. steps: number of levels. Candidate c is a child of candidate expanded[c // N], and the
    first N are the root's. Returns expanded, LongTensor [B, 1 + N * (steps - 1)], and the numbers of nodes 1 to N - 1.
    """
    nodes = parents.shape[1]
    numbers = parents.clamp(min=0) * nodes + torch.arange(nodes, device=parents.device)
    return F.pad(numbers, (0, 1 + nodes * (steps - 2))), numbers[:, 1:].contiguous()


def prefill_positions(prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> Tensor:
    """The positions of a prefill's tokens, LongTensor [T] on the CPU: each request's continue its cached prefix."""
    pairs = zip(prefix_lens, extend_lens, strict=True)
    return torch.cat([torch.arange(start, start + count) for start, count in pairs])
