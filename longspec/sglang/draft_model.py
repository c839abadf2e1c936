"""The draft's layer with what it shares with the target: embedding, head and rotary table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.torch.layers import ResidualStream
from longspec.models.draft_layer import GlideDecoderLayer, head_dim
from longspec.models.draft_vocabulary import extra_columns, prompt_tokens
from longspec.models.fused import FusedDraftLayer, rope_table
from longspec.models.parallel import VocabularyEmbedding, VocabularyHead, head_rows, share_target, split_draft


class DraftModel:
    """Levels of the draft and their logits. Requests are numbered as SGLang's request pool numbers them."""

    def __init__(
        self,
        layer: GlideDecoderLayer,
        config: PreTrainedConfig,
        weights: tuple[nn.Parameter, nn.Parameter],
        positions: int,
        requests: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """weights: those of the target's embedding and head, [rows, hidden], of all tokens. group: the ranks that share
        the target, each with the rows of its tokens; None for one. positions: length of the rotary table. requests:
        rows of SGLang's request pool."""
        self.config = config
        table, head = weights
        self.backend = Backend(DecodingAttention())  # the CPU's own functions take no paged keys
        if table.is_cuda:  # CUDA graphs can capture Triton's attention
            self.backend = choose_backend("triton", table.device, table.dtype, head_dim(config))
        self.embed: Callable[[Tensor], Tensor] = partial(self.backend.embed, table)
        self.head: Any = SimpleNamespace(weight=head[: config.vocab_size])  # SGLang pads the vocabulary
        if group is not None:
            share_target(group)
            pair = SimpleNamespace(draft_model=layer, config=config)
            split_draft(pair)
            layer = pair.draft_model
            first = dist.get_rank(group) * len(head)
            self.embed = VocabularyEmbedding(table, first)
            self.head = VocabularyHead(head, first, config.vocab_size)
        self.layer = FusedDraftLayer(layer)
        self.window = layer.window
        self.layers = (config.num_hidden_layers - 1, *layer.options.kv_layers)
        """The target's layers that the draft reads, in the order of its cross-attentions."""
        self.reads_hidden = layer.options.target_feature
        rotary: Any = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # all supported families have it
        self.rope = rope_table(rotary.to(table.device), table, positions)
        self.listed = layer.vocabulary
        if self.listed is not None:
            most = extra_columns(config.vocab_size, len(self.listed), 1)
            self.own_tokens = torch.full((requests, most), -1, dtype=torch.int32, device=table.device)
            """Tokens of each prompt that are not in the list, the most recent first; -1 where it has fewer."""
        self.read_head()

    def read_head(self) -> None:
        """Copy the head's rows of the vocabulary list; again after the target's weights have changed."""
        if self.listed is not None:
            self.listed_rows = head_rows(self.head, self.listed)

    def stream(self, tokens: Tensor) -> ResidualStream:
        """A pass that starts with the embeddings of tokens [B, n]."""
        return self.backend.stream(self.embed(tokens), self.config.rms_norm_eps)

    def in_table(self, positions: Tensor) -> Tensor:
        """Positions within the rotary table; a round can reach beyond the last one that a request can have."""
        return positions.clamp(max=len(self.rope[0]) - 1)

    def feature(self, hidden: Tensor) -> Tensor:
        """The feature [B, 1, hidden] of the target's last hidden states [B, hidden]."""
        return self.layer.feature(self.backend.stream(hidden[:, None].contiguous(), self.config.rms_norm_eps))

    def columns(self, requests: Tensor) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
        """The columns of a round's logits: their tokens, LongTensor [B, C], the list's and then each request's own, or
        None for all tokens; and the function of hidden states [B, n, hidden] -> logits [B, n, C]."""
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
