"""The draft's layer with what it shares with the target: embedding, head and rotary table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspec.models.draft import Rope
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import GLIDE, GlideDecoderLayer
from longspec.models.draft_vocabulary import MAPS, listed_tokens
from longspec.models.families import class_of
from longspec.models.parallel import VocabularyEmbedding, VocabularyHead, head_rows, share_target, split_draft

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
    # PyTorch's norm is one kernel; transformers' is seven.
    layer_class = type(family.__name__, (family,), {"norm_class": nn.RMSNorm})
    with torch.device("meta"):
        layer = layer_class(config, draft_settings(path).options)
    layer.load_state_dict({name: weight.to(device, dtype) for name, weight in weights.items()}, assign=True)
    layer.set_vocabulary(listed_tokens(maps["d2t"]).to(device) if maps else None)
    return layer.requires_grad_(False).eval()


def rotary_table(config: PreTrainedConfig, positions: int, device: torch.device, dtype: torch.dtype) -> Rope:
    """cos and sin [positions, D] of the target's rotary embedding, which all supported families share."""
    rotary = LlamaRotaryEmbedding(config).to(device)  # type: ignore[arg-type]  # that of every family
    like = torch.empty(0, device=device, dtype=dtype)
    cos, sin = rotary(like, torch.arange(positions, device=device)[None])
    return cos[0], sin[0]


class DraftModel:
    """Levels of the draft and their logits. Requests are numbered as SGLang's request pool numbers them."""

    def __init__(
        self,
        layer: GlideDecoderLayer,
        config: PreTrainedConfig,
        weights: tuple[nn.Module, Tensor, Tensor],
        positions: int,
        requests: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """weights: the target's embedding module, and the weights of its embedding and head, [rows, hidden], of all
        tokens. group: the ranks that share the target, each with the rows of its tokens; None for one. positions:
        length of the rotary table. requests: rows of SGLang's request pool."""
        self.config = config
        embed, embed_weight, head_weight = weights
        self.head: nn.Module = _Head(head_weight, config.vocab_size)
        self.embed = embed
        if group is not None:
            share_target(group)
            shared = SimpleNamespace(draft_model=layer, config=config)
            split_draft(shared)
            layer = shared.draft_model
            first = dist.get_rank(group) * len(head_weight)
            self.embed = VocabularyEmbedding(nn.Parameter(embed_weight, requires_grad=False), first)
            self.head = VocabularyHead(nn.Parameter(head_weight, requires_grad=False), first, config.vocab_size)
        self.layer = layer
        self.layers = (config.num_hidden_layers - 1, *layer.options.kv_layers)
        """The target's layers that the draft reads, in the order of its cross-attentions."""
        self.reads_hidden = layer.options.target_feature
        device = embed_weight.device
        self.cos, self.sin = rotary_table(config, positions, device, embed_weight.dtype)
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

    def rope(self, positions: Tensor) -> Rope:
        """cos, sin [B, T, D] at positions, LongTensor [B, T]."""
        positions = positions.clamp(max=len(self.cos) - 1)
        return self.cos[positions], self.sin[positions]

    def keys_values(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The draft's own keys and values [T, K, D] of tokens at positions, LongTensors [T]."""
        keys, values = self.layer.keys_values(self.embed(tokens[None]), self.rope(positions[None]))
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def feature(self, hidden: Tensor | None) -> Tensor | None:
        """The feature [B, 1, hidden] of the target's last hidden states [B, hidden], if the draft reads them."""
        return self.layer.feature(hidden[:, None]) if self.reads_hidden and hidden is not None else None

    def level(
        self,
        tokens: Tensor,
        positions: Tensor,
        self_attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        cross_attends: Sequence[Callable[[Tensor], Tensor]],
        feature: Tensor | None,
    ) -> Tensor:
        """Hidden states [B, n, hidden] of tokens at positions, LongTensors [B, n]; see `GlideDecoderLayer.forward`."""
        return self.layer(self.embed(tokens), self.rope(positions), self_attend, cross_attends, feature)

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
        self.own_tokens[request].copy_(row)

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
            return self.model.head(hidden)
        assert self.model.listed_rows is not None
        own = torch.baddbmm(self.bias[:, None], hidden, self.own_rows.transpose(1, 2))
        return torch.cat([F.linear(hidden, self.model.listed_rows), own], 2)

    def best(self, hidden: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [B, n, topk] of the most probable columns."""
        values, columns = self.logits(hidden).float().log_softmax(-1).topk(topk, dim=-1)
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

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def recent_tokens(tokens: Iterable[int], listed: set[int]) -> list[int]:
    """The distinct tokens that are not in `listed`, the most recent first, at most MOST_EXTRA."""
    distinct = dict.fromkeys(reversed(list(tokens)))
    return [token for token in distinct if token not in listed][:MOST_EXTRA]
