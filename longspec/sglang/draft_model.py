"""The draft's layer with what it shares with the target: embedding, head and rotary table."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from longspec.kernels.backend import Backend
from longspec.kernels.choice import choose_backend
from longspec.kernels.shared.device import upload
from longspec.kernels.shared.residual import RopeTable
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.torch.layers import ResidualStream
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import GLIDE, DraftOptions, GlideDecoderLayer, head_dim
from longspec.models.draft_vocabulary import MAPS, extra_columns, listed_tokens, prompt_tokens
from longspec.models.families import class_of
from longspec.models.fused import FusedDraftLayer, rope_table
from longspec.models.parallel import VocabularyEmbedding, VocabularyHead, head_rows, share_target, split_draft


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
    return choose_backend("triton", device, dtype, width) if device.type == "cuda" else Backend(DecodingAttention())


class DraftModel:
    """Levels of the draft and their logits. Requests are numbered as SGLang's request pool numbers them."""

    listed_rows: Tensor
    """With a vocabulary list: the head's rows for it."""
    own_tokens: Tensor
    """With a vocabulary list: IntTensor [requests, E], tokens of each prompt that are not in the list, the most recent
    first; -1 where it has fewer."""

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
        self.head: Any = SimpleNamespace(weight=head_weight[: config.vocab_size])  # SGLang pads the vocabulary
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
        self.rope = rotary_table(config, positions, self.table)
        self.listed = layer.vocabulary
        if self.listed is not None:
            most = extra_columns(config.vocab_size, len(self.listed), 1)
            self.own_tokens = torch.full((requests, most), -1, dtype=torch.int32, device=self.table.device)
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

    def feature(self, hidden: Tensor | None) -> Tensor | None:
        """The feature [B, 1, hidden] of the target's last hidden states [B, hidden], if the draft reads them."""
        if not self.reads_hidden or hidden is None:
            return None
        return self.layer.feature(self.backend.stream(hidden[:, None].contiguous(), self.config.rms_norm_eps))

    def columns(self, requests: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
        """The columns of the logits of a round of requests, LongTensor [B]: all tokens, or the C tokens of the list and
        then each request's own.

        Returns the columns' tokens, LongTensor [B, C] (None for all), and the function of hidden states
        [B, n, hidden] -> logits [B, n, C].
        """
        if self.listed is None:
            return None, self._logits
        extra = extra_columns(self.config.vocab_size, len(self.listed), len(requests))
        own = self.own_tokens[requests, :extra].long()
        weight = head_rows(self.head, own.clamp(min=0)).transpose(1, 2)
        bias = torch.zeros_like(own, dtype=weight.dtype).masked_fill_(own < 0, -torch.inf)[:, None]

        def logits(hidden: Tensor) -> Tensor:
            listed = self.backend.linear(hidden, self.listed_rows)
            return torch.cat([listed, torch.baddbmm(bias, hidden, weight)], 2)

        return torch.cat([self.listed.expand(len(own), -1), own], 1), logits

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.backend.linear(hidden, self.head.weight)
        return self.head.gathered(logits) if isinstance(self.head, VocabularyHead) else logits

    def note_prompt(self, request: int, tokens: list[int]) -> None:
        """Remember the most recent tokens of a request's prompt that the vocabulary list lacks."""
        if self.listed is None:
            return
        prompt = upload(torch.tensor([tokens]), self.listed.device)
        lengths = torch.full((1,), len(tokens), device=prompt.device)
        positions = prompt_tokens(prompt, lengths, self.listed, self.config.vocab_size)
        position, own = positions[0].topk(self.own_tokens.shape[1])
        self.own_tokens[request] = own.where(position >= 0, -1)
