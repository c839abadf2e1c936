"""The draft's layer with what it shares with the target: embedding, head and rotary table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspec.kernels.backend import Backend
from longspec.kernels.choice import choose_backend
from longspec.kernels.shared.device import upload
from longspec.kernels.shared.residual import ResidualStream, RopeTable, TokenSlots
from longspec.kernels.shared.tree import Tree, new_tree
from longspec.kernels.torch.attention import SdpaAttention
from longspec.kernels.torch.backend import TorchBackend
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import GLIDE, DraftOptions, GlideDecoderLayer, head_dim
from longspec.models.draft_vocabulary import MAPS, listed_tokens
from longspec.models.families import class_of
from longspec.models.fused import FusedDraftLayer, rope_table
from longspec.models.parallel import VocabularyEmbedding, VocabularyHead, head_rows, share_target, split_draft
from longspec.models.target_attention import QueryAttend

MOST_EXTRA = 2048
"""Largest number of prompt tokens outside the draft's vocabulary list that a request can draft."""
TOTAL_EXTRA = 8192
"""Number of such tokens that all requests of a batch share."""
LEAST_EXTRA = 64
"""Number of such tokens that a request has in any case."""


def load_layer(path: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> GlideDecoderLayer:
    """The draft at `path` for a target with `config`, frozen. Raises UserError if it does not fit."""
    family = class_of(config.model_type).draft_layer_class
    weights = check_draft(path, config, family, only=GLIDE)
    maps = {name: weights.pop(name) for name in MAPS if name in weights}
    options = draft_settings(path).options
    assert isinstance(options, DraftOptions)
    with torch.device("meta"):
        layer = family(config, options)
    layer.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    layer.set_vocabulary(listed_tokens(maps["d2t"]).to(device) if maps else None)
    return layer.requires_grad_(False).eval()


def rotary_table(config: PreTrainedConfig, positions: int, like: Tensor) -> RopeTable:
    """cos and sin [positions, D] of the target's rotary embedding, which all supported families share."""
    return rope_table(LlamaRotaryEmbedding(config).to(like.device), like, positions)  # type: ignore[arg-type]


def device_backend(device: torch.device, dtype: torch.dtype, width: int) -> Backend:
    """The backend of the draft's passes. On a GPU its attention is Triton's, which CUDA graphs can capture."""
    return choose_backend("triton", device, dtype, width) if device.type == "cuda" else TorchBackend(SdpaAttention())


class DraftModel:
    """Levels of the draft and their logits. Requests are numbered as SGLang's request pool numbers them."""

    def __init__(
        self,
        layer: GlideDecoderLayer,
        config: PreTrainedConfig,
        weights: tuple[Tensor, Tensor],
        positions: int,
        requests: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """weights: those of the target's embedding and head, [rows, hidden], of all tokens. group: the ranks that share
        the target, each with the rows of its tokens; None for one. positions: length of the rotary table. requests:
        rows of SGLang's request pool."""
        self.config = config
        self.table, head_weight = weights
        self.backend = device_backend(self.table.device, self.table.dtype, head_dim(config))
        self.split_embedding: VocabularyEmbedding | None = None
        self.head: nn.Module = _Head(head_weight, config.vocab_size)
        if group is not None:
            share_target(group)
            shared = SimpleNamespace(draft_model=layer, config=config)
            split_draft(shared)
            layer = shared.draft_model
            first = dist.get_rank(group) * len(head_weight)
            self.split_embedding = VocabularyEmbedding(nn.Parameter(self.table, requires_grad=False), first)
            self.head = VocabularyHead(nn.Parameter(head_weight, requires_grad=False), first, config.vocab_size)
        self.layer = FusedDraftLayer(layer)
        self.layers = (config.num_hidden_layers - 1, *layer.options.kv_layers)
        """The target's layers that the draft reads, in the order of its cross-attentions."""
        self.reads_hidden = layer.options.target_feature
        device = self.table.device
        self.rope = rotary_table(config, positions, self.table)
        self.trees: dict[int, Tree] = {}
        """Room for the best children of each number of nodes."""
        self.listed = layer.vocabulary
        self.listed_rows: Tensor | None = None
        self.own_tokens: Tensor | None = None
        """With a vocabulary list: IntTensor [requests, MOST_EXTRA], tokens of each prompt that are not in the list, the
        most recent first; -1 where it has fewer."""
        if self.listed is not None:
            self.own_tokens = torch.full((requests, MOST_EXTRA), -1, dtype=torch.int32, device=device)
            self.read_head()

    def read_head(self) -> None:
        """Copy the head's rows of the vocabulary list; again after the target's weights have changed."""
        if self.listed is not None:
            self.listed_rows = head_rows(self.head, self.listed)

    def stream(self, tokens: Tensor) -> ResidualStream:
        """A pass that starts with the embeddings of tokens [B, n]."""
        embed = self.split_embedding
        embeddings = self.backend.embed(self.table, tokens) if embed is None else embed(tokens)
        return self.backend.stream(embeddings, self.config.rms_norm_eps)

    def in_table(self, positions: Tensor) -> Tensor:
        """Positions within the rotary table; a round can reach beyond the last one that a request can have."""
        return positions.clamp(max=len(self.rope[0]) - 1)

    def store_keys_values(self, tokens: Tensor, slots: TokenSlots) -> None:
        """Store the draft's own keys and values of tokens [1, T]."""
        self.layer.store_keys_values(self.stream(tokens), slots)

    def feature(self, hidden: Tensor | None) -> Tensor | None:
        """The feature [B, 1, hidden] of the target's last hidden states [B, hidden], if the draft reads them."""
        if not self.reads_hidden or hidden is None:
            return None
        return self.layer.feature(self.backend.stream(hidden[:, None].contiguous(), self.config.rms_norm_eps))

    def level(
        self,
        tokens: Tensor,
        slots: TokenSlots,
        self_attend: QueryAttend,
        cross_attends: Sequence[QueryAttend],
        feature: Tensor | None,
    ) -> Tensor:
        """Hidden states [B, n, hidden] of tokens [B, n]; see `GlideDecoderLayer.forward`. The tokens' keys and values
        are in their slots before `self_attend` runs."""
        stream = self.stream(tokens)
        self.layer.add_to(stream, slots, self_attend, cross_attends, feature)
        return stream.hidden

    def logits(self, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
        """hidden [B, n, hidden] -> logits of all tokens [B, n, V], or of the rows of `weight`."""
        if weight is not None:
            return self.backend.linear(hidden, weight)
        logits = self.backend.linear(hidden, self.head.weight)  # type: ignore[arg-type]
        return self.head.gathered(logits) if isinstance(self.head, VocabularyHead) else logits

    def best(self, logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and columns [B, n, topk] of the largest logits [B, n, C], the largest first. The next call
        overwrites the log-probabilities."""
        batch, nodes, columns = logits.shape
        # Each node is the root of a tree of its own, which grows by one level; the root's score stays 0.
        rows = batch * nodes
        if rows not in self.trees:
            self.trees[rows] = new_tree(rows, 1 + topk, False, logits.device)
        tree = self.trees[rows]
        self.backend.grow_level(tree, slice(0, 1), topk, logits.view(rows, 1, columns), None)
        # The columns are copied, because the tree of a round keeps them.
        return tree.scores[:, 1:].view(batch, nodes, topk), tree.tokens[:, 1:].clone().view(batch, nodes, topk)

    def columns(self, requests: Tensor) -> RoundColumns:
        """The columns of the logits of a round of requests, LongTensor [B]."""
        if self.listed is None or self.own_tokens is None:
            return RoundColumns(self)
        extra = min(MOST_EXTRA, max(LEAST_EXTRA, TOTAL_EXTRA // len(requests)))
        return RoundColumns(self, self.own_tokens[requests, :extra].long())

    def note_prompt(self, request: int, tokens: Iterable[int]) -> None:
        """Remember the tokens of a request's prompt that the vocabulary list lacks."""
        if self.own_tokens is None:
            return
        own = recent_tokens(tokens, self._in_list)
        row = torch.full((MOST_EXTRA,), -1, dtype=torch.int32)
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
        self.own_tokens[request].copy_(upload(row, self.own_tokens.device))

    @cached_property
    def _in_list(self) -> set[int]:
        return set() if self.listed is None else set(self.listed.tolist())


class RoundColumns:
    """The columns of a round's logits: all tokens, or those of the list and then each request's own."""

    def __init__(self, model: DraftModel, own: Tensor | None = None) -> None:
        """own: LongTensor [B, E], -1 for empty columns; None for all tokens."""
        self.model = model
        self.own = own
        if own is not None:
            self.own_rows = head_rows(model.head, own.clamp(min=0))
            self.bias = torch.zeros_like(own, dtype=self.own_rows.dtype).masked_fill_(own < 0, -torch.inf)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, n, hidden] -> [B, n, C]"""
        if self.own is None:
            return self.model.logits(hidden)
        own = torch.baddbmm(self.bias[:, None], hidden, self.own_rows.transpose(1, 2))
        return torch.cat([self.model.logits(hidden, self.model.listed_rows), own], 2)

    def best(self, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [B, n, topk] of the most probable columns."""
        values, columns = self.model.best(self.logits(hidden), topk)
        if self.own is None or self.model.listed is None:
            return values, columns
        listed = self.model.listed
        own = columns - len(listed)
        tokens = self.own[:, None].expand(-1, columns.shape[1], -1).gather(2, own.clamp(min=0))
        return values, torch.where(own < 0, listed[columns.clamp(max=len(listed) - 1)], tokens)


class _Head(nn.Module):
    """The head of the whole vocabulary, on the target's own weight, which SGLang pads."""

    def __init__(self, weight: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.weight = weight[:vocab_size]


def recent_tokens(tokens: Iterable[int], listed: set[int]) -> list[int]:
    """The distinct tokens that are not in `listed`, the most recent first, at most MOST_EXTRA."""
    distinct = dict.fromkeys(reversed(list(tokens)))
    return [token for token in distinct if token not in listed][:MOST_EXTRA]
