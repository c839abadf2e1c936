"""The two caches of decoding: the target's keys and values for all layers, and the draft's window of constant size."""

from copy import copy
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from longspec.kernels.backend import Backend
from longspec.kernels.shared.watch import Watch
from longspec.models.draft_layer import head_dim
from longspec.models.parallel import model_parallel_rank_and_size, ranks_differ


class Fault(IntEnum):
    """The reason why a row's tokens are undefined. DRAFT, TARGET: this model's logits are NaN or infinite and thus
    define no distribution. RANKS: the ranks that share the target have different tokens."""

    DRAFT = 1
    TARGET = 2
    RANKS = 3


def fault_message(fault: int, position: int, temperature: float) -> str:
    """What a fault means for the token after `position`, and what to do."""
    if fault == Fault.RANKS:
        return (
            f"position {position}: the ranks that share the target disagree; run all of them on GPUs of one model, "
            "with the same versions of the driver, torch, NCCL and longspec"
        )
    return (
        f"position {position}: the {Fault(fault).name.lower()}'s logits are NaN or infinite at temperature "
        f"{temperature:g}; check its weights and its dtype, and options that ban tokens"
    )


def rank_kv_heads(config: PreTrainedConfig) -> int:
    """KV heads K of this process: all of the target's, or a share of them if several ranks share the target."""
    return config.num_key_value_heads // model_parallel_rank_and_size()[1]


class TargetCache:
    """Keys and values of the target for all layers: two tensors [L, B, K, S, D]. Slots 0 ... lengths[b] - 1 of row b
    hold accepted tokens, in order of position; the slots after them are scratch space for the nodes of a tree."""

    def __init__(
        self,
        config: PreTrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        lengths: Tensor | None = None,
    ) -> None:
        """capacity: slots per row, S. lengths: int32 [B], zeros that the cache takes over; None for new ones."""
        shape = (config.num_hidden_layers, batch, rank_kv_heads(config), capacity, head_dim(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device) if lengths is None else lengths
        """int32 [B]: accepted tokens per row."""
        self.prefix_lengths = self.lengths
        """int32 [B]: slots that attention to the prefix reads: `lengths`, or 0 for inactive rows (see `reading`)."""
        self.newest_hidden = torch.zeros(batch, 1, config.hidden_size, dtype=dtype, device=device)
        """[B, 1, hidden]: the target's last hidden state at the newest accepted token, for drafters that read it."""
        self.rows = torch.arange(batch, device=device)[:, None]
        """LongTensor [B, 1]: row numbers, to index with slots [B, N]."""
        self.faults = torch.zeros(batch, dtype=torch.long, device=device)
        """LongTensor [B]: 0, or the `Fault` of a row since prefill. The host reads it with the tokens of a round."""
        self.selected: Tensor | None = None
        """int [n]: the rows that a pass stores to, for a cache made by `select`."""
        self._whole: tuple[TargetCache, int] | None = None
        """Set for a part made by `narrow`: the whole cache, and the number of the part's first row in it."""

    @property
    def all_rows(self) -> int:
        """Number of rows of the whole cache, also for a part of it."""
        whole = self._whole[0] if self._whole else self
        return len(whole.rows)

    def narrow(self, rows: slice) -> "TargetCache":
        """The consecutive `rows` as a cache that shares the tensors of this one."""
        if rows == slice(0, len(self.lengths)):
            return self
        part = copy(self)
        part.keys = self.keys[:, rows]
        part.values = self.values[:, rows]
        part.lengths = self.lengths[rows]
        part.prefix_lengths = self.prefix_lengths[rows]
        part.newest_hidden = self.newest_hidden[rows]
        part.faults = self.faults[rows]
        part.rows = self.rows[: len(part.lengths)]
        part._whole = (self, rows.start or 0)
        return part

    def select(self, rows: Tensor) -> "TargetCache":
        """The cache for passes over n sequences, of which number b is in row rows[b]. rows: int [n], on the device.
        Only the keys and values serve such a pass; a captured one can be replayed with other rows."""
        part = copy(self)
        part.selected = rows
        return part

    def reading(self, active: Tensor) -> "TargetCache":
        """The cache as a round reads it, on the same tensors: inactive rows have no prefix. active: bool [B]. Slots are
        still assigned after `lengths`, so an inactive row keeps its accepted tokens."""
        part = copy(self)
        part.prefix_lengths = self.lengths * active
        return part

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, S, D] of one layer, for the draft's cross-attention."""
        return self.keys[number], self.values[number]

    def watch(self, fault: Fault) -> Watch:
        """A record for kernels that read logits: they set `fault` for rows whose logits define no distribution."""
        return Watch(self.faults, int(fault))

    def compare_ranks(self, tokens: Tensor, counts: Tensor) -> None:
        """Set `Fault.RANKS` for all rows if the ranks that share the target disagree on the result of a round. tokens:
        LongTensor [B, n]; counts: LongTensor [B], the number of valid tokens per row."""
        if model_parallel_rank_and_size()[1] == 1:
            return
        is_valid = self.faults == 0
        counts = counts.where(is_valid, 0)
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        result = torch.cat([tokens.where(steps < counts[:, None], 0), counts[:, None]], 1)
        self.faults.masked_fill_(ranks_differ(result) & is_valid, int(Fault.RANKS))

    def next_slots(self, count: int) -> Tensor:
        """The `count` slots after the accepted tokens of each row, LongTensor [B, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def keep(self, path: Tensor, counts: Tensor, backend: Backend) -> None:
        """Accept the first counts[b] nodes of `path`: move their entries next to the accepted tokens, in all layers.
        path: LongTensor [B, J], increasing numbers of nodes of the tree in `next_slots`; counts: [B]."""
        if self._whole is not None:  # the kernel needs contiguous tensors, and accepts nothing in the other rows
            whole, first = self._whole
            others = (first, len(whole.lengths) - first - len(counts))
            whole.keep(F.pad(path, (0, 0, *others)), F.pad(counts, others), backend)
            return
        backend.compact(self.keys, self.values, self.lengths, path, counts)
        self.lengths += counts


class SlotWriter(Cache):
    """A target cache during one pass of transformers' modules, which store keys and values through `update`."""

    def __init__(self, cache: TargetCache, slots: Tensor) -> None:
        """slots: LongTensor [B, N], where the pass stores its tokens."""
        super().__init__(layers=[])
        self.cache, self.slots = cache, slots

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values [B, K, N, D] of a layer; return all its slots [B, K, S, D]."""
        keys, values = self.cache.layer(layer_idx)
        keys[self.cache.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.cache.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys, values


class DraftCache:
    """The draft's own keys and values [B, K, W + N, D]: a ring buffer of the W tokens before the root, the token at
    position p in slot p % W, then the N nodes of a tree."""

    def __init__(
        self, config: PreTrainedConfig, batch: int, window: int, nodes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """window: W, the draft's attention window; nodes: N."""
        shape = (batch, rank_kv_heads(config), window + nodes, head_dim(config))
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.window = window
        self.rows = torch.arange(batch, device=device)[:, None]
        self.node_slots = torch.arange(window, window + nodes, device=device).expand(batch, -1)
        """LongTensor [B, N]: the slot of each node."""

    def narrow(self, rows: slice) -> "DraftCache":
        part = copy(self)
        part.keys = self.keys[rows]
        part.values = self.values[rows]
        part.rows = self.rows[: len(part.keys)]
        part.node_slots = self.node_slots[rows]
        return part

    def with_nodes(self, nodes: int) -> "DraftCache":
        """The window and the first `nodes` nodes as a cache that shares the tensors of this one."""
        part = copy(self)
        part.keys = self.keys[:, :, : self.window + nodes]
        part.values = self.values[:, :, : self.window + nodes]
        part.node_slots = self.node_slots[:, :nodes]
        return part

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Store accepted tokens in the window, where `valid`. keys, values: [B, K, T, D]; positions: LongTensor [B, T],
        at most W consecutive ones; valid: bool [B, T]."""
        # Entries that are not valid are rewritten unchanged, because a round has static shapes.
        slots = positions % self.window
        for store, new in ((self.keys, keys), (self.values, values)):
            old = store[self.rows, :, slots]
            store[self.rows, :, slots] = torch.where(valid[..., None, None], new.transpose(1, 2), old)

    def write_nodes(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Store keys and values [B, K, n, D] of the nodes first ... first + n - 1."""
        slots = slice(self.window + first, self.window + first + keys.shape[2])
        self.keys[:, :, slots] = keys
        self.values[:, :, slots] = values
