"""The EAGLE-3 draft during decoding: its KV cache of accepted tokens, and the forward pass of one level of a tree."""

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.inference.cache import DraftCache, TargetCache
from longspec.inference.drafting.decoder import DraftDecoder, Level
from longspec.inference.runner import Runner
from longspec.kernels.shared.residual import RopeTable, TokenSlots
from longspec.kernels.torch.layers import ResidualStream
from longspec.models.eagle3 import Eagle3Draft
from longspec.models.fused import rope_table


class Eagle3Decoder(DraftDecoder):
    """Token j of the text is at position j - 1 of the cache, because it is read with the state of the token before it.
    With a window, the cache is a ring buffer, then the nodes of a tree. Otherwise it has room for the whole text, and
    nodes are stored after it."""

    @property
    def draft(self) -> Eagle3Draft:
        draft = super().draft
        assert isinstance(draft, Eagle3Draft)
        return draft

    def __init__(self, runner: Runner, batch: int, nodes: int) -> None:
        super().__init__(runner, batch, nodes)
        self.layer_inputs, self.scale = self.draft.reads.layer_inputs, self.draft.midlayer.self_attn.head_dim**-0.5
        hidden = self.draft.config.hidden_size
        self.newest = torch.zeros(batch, 1, hidden, dtype=runner.dtype, device=runner.device)
        """[B, 1, hidden]: the fused state of the newest token that the target has read."""
        self.states = self.newest.new_zeros(batch, nodes, hidden)
        """[B, N, hidden]: the state of each node, which its children take as input."""
        tokens = self.draft.vocabulary
        self.ids = None if tokens is None else tokens.expand(batch, -1)
        self.cache = DraftCache(self.draft.config, batch, 1, nodes, runner.dtype, runner.device)
        self.grows = False
        """Whether the cache has room for the whole text."""
        self.rope: RopeTable = (torch.empty(0), torch.empty(0))

    def state_bytes(self, longest: int) -> tuple[int, int]:
        slot = 2 * self.cache.keys[0, :, 0].numel() * self.runner.dtype.itemsize
        return (0, slot) if self.draft.window >= longest else (slot * (self.draft.window + self.nodes), 0)

    def reserve(self, capacity: int) -> None:
        if len(self.rope[0]) < capacity:
            self.grows = self.draft.window >= capacity
            size = (capacity, 0) if self.grows else (self.draft.window, self.nodes)
            self.cache = DraftCache(self.draft.config, len(self.newest), *size, self.runner.dtype, self.runner.device)
            self.rope = rope_table(self.draft.rotary[0], self.draft.fc.weight, capacity)

    def narrow(self, rows: slice) -> "Eagle3Decoder":
        part = copy(self)
        part.newest, part.states, part.cache = self.newest[rows], self.states[rows], self.cache.narrow(rows)
        part.ids = None if self.ids is None else self.ids[rows]
        return part

    def with_nodes(self, nodes: int) -> "Eagle3Decoder":
        part = super().with_nodes(nodes)
        part.states, part.cache = self.states[:, :nodes], self.cache.with_nodes(nodes)
        return part

    def row_states(self) -> list[Tensor]:
        return [self.cache.keys, self.cache.values, self.newest]

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Zero unfilled slots of a ring buffer: masked slots must be finite, and earlier requests may have left NaN."""
        self.states.zero_()
        if self.grows:
            return
        slots = torch.arange(self.cache.keys.shape[2], device=lengths.device)
        stale = (slots >= lengths[:, None] - 1) | (slots >= self.cache.window)
        for store in (self.cache.keys, self.cache.values):
            store.masked_fill_(stale[:, None, :, None], 0)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        assert states is not None
        fused = self.draft.fuse(states)
        before = torch.cat([self.newest, fused[:, :-1]], 1)
        attention, window = self.draft.midlayer.self_attn, self.cache.window
        kv = self._projected(self._inputs(tokens, before)[1], attention.k_proj, attention.v_proj)
        # The first token of a text has no state before it. Tokens with a negative slot are not stored.
        slots = torch.where(valid & (positions > 0), (positions - 1) % window, -1)
        for start in range(0, tokens.shape[1], window):  # the cache takes as many tokens at a time as it has slots
            part = slice(start, start + window)
            own = kv[:, part].contiguous()
            # A stream of its own for each part, because a stream keeps the positions that it has seen.
            self._stream(own).rotate_and_store(own, self._slots((positions[:, part] - 1).clamp(min=0), slots[:, part]))
        last = (valid.sum(1) - 1).clamp(min=0)[:, None, None].expand(-1, -1, fused.shape[2])
        self.newest.copy_(fused.gather(1, last).where(valid[:, :1, None], self.newest))

    def level(self, level: Level, cache: TargetCache, feature: Tensor | None) -> Tensor:
        draft, layer, attention = self.draft, self.draft.midlayer, self.draft.midlayer.self_attn
        length, end = (cache.lengths - 1).clamp(min=0), level.first + level.tokens.shape[1]
        if level.depth:
            # Nodes that only fill up their level have no parent, and nothing reads what they propose.
            parents = level.parents.clamp(min=0)[..., None].expand(-1, -1, self.states.shape[2])
            states = self.states.gather(1, parents)
        else:
            states = self.newest.clone()  # the stream below is changed in place
        normed, x = self._inputs(level.tokens, states)
        stream = self._stream(normed if draft.options.norm_before_residual else states)
        if self.grows:
            slots = length[:, None] + torch.arange(level.first, end, device=length.device)
        else:
            slots = self.cache.node_slots[:, level.first : end]
        positions = length[:, None].expand_as(level.tokens) + level.depth
        qkv = self._projected(x, attention.q_proj, attention.k_proj, attention.v_proj)
        heads = self._attend(stream.rotate_and_store(qkv, self._slots(positions, slots)), length, level)
        stream.add_product(heads.transpose(1, 2).flatten(2), attention.o_proj.weight)
        normed = stream.normed(layer.post_attention_layernorm.weight)
        gate, up = (self._projected(normed, linear) for linear in (layer.mlp.gate_proj, layer.mlp.up_proj))
        stream.add_product(F.silu(gate).mul_(up), layer.mlp.down_proj.weight)
        normed = stream.normed(draft.norm.weight)
        self.states[:, level.first : end] = normed if draft.options.norm_output else stream.hidden
        return self.runner.product(normed, draft.lm_head.weight)

    def _inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """RMSNorm(g) and x of tokens [B, T] and states g [B, T, hidden], as in training."""
        layer = self.draft.midlayer
        normed = self._stream(states).normed(layer.hidden_norm.weight)
        embedded = self._stream(self.embed(tokens)).normed(layer.input_layernorm.weight)
        return normed, torch.cat([embedded, normed], -1)

    def _stream(self, hidden: Tensor) -> ResidualStream:
        return self.runner.backend.stream(hidden.contiguous(), self.draft.config.rms_norm_eps)

    def _projected(self, x: Tensor, *linears: nn.Linear) -> Tensor:
        """The outputs of linears for x [B, T, in], next to each other."""
        outputs = [self.runner.backend.linear(x, linear.weight, linear.bias) for linear in linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _slots(self, positions: Tensor, slots: Tensor) -> TokenSlots:
        return TokenSlots(positions, self.rope, self.cache.keys, self.cache.values, slots)

    def _attend(self, q: Tensor, length: Tensor, level: Level) -> Tensor:
        """Attention of a level's nodes to accepted tokens, int32 [B], and to nodes; all keys and values are stored."""
        attention, cache, end = self.runner.attention, self.cache, level.first + q.shape[2]
        if not self.grows:
            return attention.window(q, cache.keys, cache.values, length, level.depth, level.visible, self.scale)
        return attention.hybrid(length, level.visible[:, :, :end])(q, cache.keys, cache.values, self.scale)

    def embed(self, tokens: Tensor) -> Tensor:
        own = self.draft.embed_tokens
        return super().embed(tokens) if own is None else own(tokens)
