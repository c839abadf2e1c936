"""The two caches of decoding: the target's static KV for all layers, and the draft's constant ring."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from longspec.kernels.decoding import tree_reference
from longspec.kernels.shared.device import runs_triton
from longspec.kernels.shared.watch import Watch
from longspec.models.draft_layer import head_dim


class Fault(IntEnum):
    """The model whose logits define no distribution."""

    DRAFT = 1
    TARGET = 2


class TargetCache(Cache):
    """One preallocated store for all layers: keys, values [L, B, Hkv, S, D].

    Slots 0 … lengths[b] - 1 of row b hold accepted tokens, in order of position. A forward pass writes its tokens
    to `slots` (LongTensor [B, N], set by whoever runs the pass); what lies past `lengths` is scratch. `newest_hidden`
    is kept up only for a drafter that reads it.
    """

    def __init__(
        self, config: PreTrainedConfig, batch: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(layers=[])
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity, head_dim(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.newest_hidden = torch.zeros(batch, 1, config.hidden_size, dtype=dtype, device=device)
        """[B, 1, hidden]: the target's hidden state, after its final norm, at each row's newest accepted token."""
        self.rows = torch.arange(batch, device=device)[:, None]
        self.slots = torch.empty(0, dtype=torch.long, device=device)
        self.faults = torch.zeros(batch, dtype=torch.long, device=device)
        """0, or the `Fault` of a row since prefill; the host reads it with each round's tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write this layer's new keys and values [B, Hkv, N, D] to `slots`; return the layer's whole store."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys, values

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, S, D] of one layer, as a cross-attention of the draft reads them."""
        return self.keys[number], self.values[number]

    def watch(self, fault: Fault) -> Watch:
        """For passes that read logits: records each row's fault."""
        return Watch(self.faults, int(fault))

    def next_slots(self, count: int) -> Tensor:
        """The `count` slots after each row's accepted tokens, LongTensor [B, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def keep(self, path: Tensor, counts: Tensor) -> None:
        """Make the first counts[b] nodes of `path` accepted tokens: move their entries up, in all layers.

        path: LongTensor [B, J], increasing node numbers of the tree just written behind `lengths`; counts: [B].
        """
        if runs_triton(self.keys):
            from longspec.kernels.decoding.compaction import compact
        else:
            compact = tree_reference.compact
        compact(self.keys, self.values, self.lengths, path, counts)
        self.lengths += counts


class DraftCache:
    """The draft's own keys and values [B, Hkv, W + N, D], whatever the context: a ring of W, then N tree nodes.

    The ring's slot p % W holds the accepted token at position p, for the W positions before the root.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch: int,
        window: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, config.num_key_value_heads, window + nodes, head_dim(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.window = window
        self.rows = torch.arange(batch, device=device)[:, None]
        self.node_slots = torch.arange(window, window + nodes, device=device).expand(batch, -1)
        """Where the tree's nodes lie, LongTensor [B, N]."""

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Put accepted tokens into the ring where `valid`.

        keys, values: [B, Hkv, T, D]; positions: LongTensor [B, T], at most W consecutive ones; valid: bool [B, T].
        """
        slots = positions % self.window
        for store, new in ((self.keys, keys), (self.values, values)):
            old = store[self.rows, :, slots]
            store[self.rows, :, slots] = torch.where(valid[..., None, None], new.transpose(1, 2), old)

    def write_nodes(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Put a level's keys and values [B, Hkv, n, D] at tree nodes first … first + n - 1."""
        slots = slice(self.window + first, self.window + first + keys.shape[2])
        self.keys[:, :, slots] = keys
        self.values[:, :, slots] = values
