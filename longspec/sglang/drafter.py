"""A round's draft on tensors alone, so that it can be a CUDA graph, and the draft's own keys and values by KV slot.

These depend on a token and its position alone, and so does a slot's content: a slot that SGLang shares between requests
(radix cache), keeps between chunks of a prefill or moves to another request holds the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.errors import UserError
from longspec.kernels.shared.attention import PagedPrefix
from longspec.kernels.shared.residual import TokenSlots
from longspec.kernels.shared.tree import SelectedNodes, Tree, new_tree
from longspec.sglang.draft_model import DraftModel
from longspec.sglang.large_batches import VerifySizes


class Drafter:
    """The draft of the requests that SGLang decodes. In its methods requests and lengths are LongTensor [B], roots too;
    root b is at position lengths[b], and the target has read all tokens before it."""

    def __init__(
        self, model: DraftModel, sizes: VerifySizes, pool: Any, table: Tensor, attend: Callable[..., None]
    ) -> None:
        """pool: SGLang's KV pool of the target, whose buffers stay where they are. table: contiguous IntTensor
        [requests, positions], the slot of each position of a request. attend: attention to the pool (see
        `TritonAttention.paged`)."""
        self.model, self.sizes, self.pool, self.table, self.attend = model, sizes, pool, table, attend
        like = pool.get_key_buffer(model.layers[0])
        if like.dim() != 3:
            raise UserError(f"GLIDE: reads keys [slots, heads, width], but SGLang stores {list(like.shape)}")
        # Zeros, because masked slots must be finite.
        self.keys, self.values = torch.zeros_like(like), torch.zeros_like(like)
        self.growths: dict[int, tuple[Tree, Tensor, tuple[Tensor, ...]]] = {}
        """Tensors in which the trees of all rounds of a batch size grow: the tree of M nodes; their depths, LongTensor
        [M]; for each level the slots of the nodes that the draft reads in a round's window, LongTensor [B, n]."""

    def propose(self, roots: Tensor, requests: Tensor, lengths: Tensor, hidden: Tensor | None = None) -> SelectedNodes:
        """The best nodes, the root included, of the tree of this batch size. hidden: the target's last hidden states
        [B, hidden] at the positions before the roots; None if the draft does not read them."""
        model, nodes = self.model, self.sizes.of(len(roots))[1]
        tree, levels, slots = self._growth(len(roots))
        tree.tokens[:, 0] = roots
        keys, values = self._window(requests, lengths, len(levels))
        window = model.backend.attention.window
        attention = partial(window, k=keys, v=values, lengths=lengths, scale=keys.shape[3] ** -0.5)
        cross_attends = self._cross_attends(requests, lengths)
        ids, logits = model.columns(requests)
        feature = None if hidden is None else model.feature(hidden)
        positions = model.in_table(lengths + torch.arange(len(slots), device=lengths.device)[:, None])
        above = slice(0, 1)
        for level, width in enumerate(self.sizes.shape(len(roots))):
            read = slice(above.start, above.start + slots[level].shape[1])
            tokens = tree.tokens[:, read]
            at = positions[level][:, None].expand_as(tokens).contiguous()
            own = TokenSlots(at, model.rope, keys, values, slots[level])
            stream = model.stream(tokens)
            self_attend = partial(attention, level=level, tree_mask=tree.visible[:, read])
            model.layer.add_to(stream, own, self_attend, cross_attends, feature)
            model.backend.grow_level(tree, above, width, logits(stream.hidden), None, ids=ids)
            above = slice(above.stop, above.stop + width)
        return model.backend.select_nodes(tree, levels, nodes, by_arrival=False)

    def _growth(self, batch: int) -> tuple[Tree, Tensor, tuple[Tensor, ...]]:
        if batch not in self.growths:
            device = self.keys.device
            widths = torch.tensor([1, *self.sizes.shape(batch)])
            levels = torch.arange(len(widths)).repeat_interleave(widths).to(device)
            numbers = self.model.window + torch.arange(len(levels), device=device).expand(batch, -1)
            most = self.sizes.most_read(batch)
            slots = tuple(part[:, :most].contiguous() for part in numbers.split(widths.tolist(), 1)[:-1])
            self.growths[batch] = new_tree(batch, len(levels), False, device), levels, slots
        return self.growths[batch]

    def _window(self, requests: Tensor, lengths: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, W + M, D] for a round of M nodes, as the backends' window attention reads them: slot
        s < W holds the newest position p < lengths[b] with p % W == s, and the slots from W on are free."""
        newest = lengths[:, None] - 1
        age = (newest - torch.arange(self.model.window, device=lengths.device)) % self.model.window
        slots = self._slots(requests, newest - age)
        room = self.keys.new_zeros(len(requests), nodes, *self.keys.shape[1:])
        keys, values = (torch.cat([store[slots], room], 1).transpose(1, 2) for store in (self.keys, self.values))
        return keys, values

    def _slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """The slots of positions, LongTensor [B, T]."""
        return self.table[requests[:, None], positions.clamp(0, self.table.shape[1] - 1)].long()

    def _cross_attends(self, requests: Tensor, lengths: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """Attention to the prefixes in each layer of the target that the draft reads."""
        begins = requests * self.table.shape[1]
        ends = begins + lengths

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
            pools = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            self.attend(q, PagedPrefix(*pools, self.table.view(-1), begins, ends), out)
            return out.transpose(1, 2)

        return [partial(attend, layer) for layer in self.model.layers]

    def store(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Store the draft's keys of tokens that the target has read; none in a negative slot. All LongTensor [T]."""
        as_row = self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]  # one sequence of all slots
        own = TokenSlots(self.model.in_table(positions[None]), self.model.rope, *as_row, slots[None])
        self.model.layer.store_keys_values(self.model.stream(tokens[None]), own)

    def store_accepted(
        self, roots: Tensor, drafted: Tensor, requests: Tensor, lengths: Tensor, accepted: Tensor
    ) -> tuple[()]:
        """Store the draft's keys of the first accepted[b] tokens of a round's path: the root, then drafted, LongTensor
        [B, T]. Lengths are as before the round."""
        tokens = torch.cat([roots[:, None], drafted], 1)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = lengths[:, None] + steps
        slots = self._slots(requests, positions).where(steps < accepted[:, None], -1)
        self.store(tokens.flatten(), positions.flatten(), slots.flatten())
        return ()


def candidates(parents: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """A tree in the numbers of SGLang's `build_tree_kernel_efficient`, called with N children per node.

    parents: see `SelectedNodes`. steps: number of levels. Candidate c is a child of candidate expanded[c // N], and the
    first N are the root's. Returns expanded, LongTensor [B, 1 + N * (steps - 1)], and the numbers of nodes 1 to N - 1.
    """
    nodes = parents.shape[1]
    numbers = parents.clamp(min=0) * nodes + torch.arange(nodes, device=parents.device)
    return F.pad(numbers, (0, 1 + nodes * (steps - 2))), numbers[:, 1:].contiguous()


def prefill_positions(prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> Tensor:
    """The positions of a prefill's tokens, LongTensor [T] on the CPU: each request's continue its cached prefix."""
    pairs = zip(prefix_lens, extend_lens, strict=True)
    return torch.cat([torch.arange(start, start + count) for start, count in pairs])
