"""The forward passes of decoding on fused layers, which CUDA graphs can capture, and the choice of a runner."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspec.errors import UserError, warn_once
from longspec.inference.cache import DraftCache, TargetCache
from longspec.inference.runner import Runner, model_backend
from longspec.kernels import DETERMINISTIC
from longspec.kernels.backend import Backend
from longspec.kernels.shared.attention import Attend
from longspec.kernels.shared.device import plain_gpu
from longspec.kernels.shared.residual import RopeTable, TokenSlots
from longspec.kernels.torch.layers import ResidualStream
from longspec.models.draft_layer import GlideDecoderLayer, QueryAttend, head_dim
from longspec.models.fused import FusedDraftLayer, FusedTargetLayer, can_fuse, rope_table
from longspec.models.glide import GlideMixin
from longspec.models.parallel import VocabularyEmbedding, VocabularyHead, model_parallel_rank_and_size
from longspec.models.target_attention import LayerInputs


class FusedRunner(Runner):
    """The passes of `Runner` on the same parameters, in few operations. Needs layers that `can_fuse`."""

    owned = ("model", "backbone", "layers", "draft_layer")

    def __init__(self, model: GlideMixin, backend: Backend | None = None) -> None:
        super().__init__(model, backend)
        self.capturable = self.backend.capturable and self.attention.capturable and self.device.type == "cuda"
        self.backbone: Any = model.model
        self.layers = [FusedTargetLayer(layer) for layer in self.backbone.layers]
        draft = model.draft_model
        self.draft_layer = FusedDraftLayer(draft) if isinstance(draft, GlideDecoderLayer) else None
        """None for a draft of another architecture, whose decoder computes its layer."""
        self.scale = head_dim(self.config) ** -0.5
        self.rope: RopeTable = (torch.empty(0), torch.empty(0))
        self.cross_output = None if self.draft_layer is None else self.draft_layer.cross.merged_output
        """The merged outputs of the draft's cross-attentions, which captured rounds read; None for a single one."""

    def take_weights(self, other: Runner) -> None:
        super().take_weights(other)
        if self.draft_layer is not None and self.cross_output is not None:
            # The weights can have changed since the copy was made, but captured rounds read it at its address.
            self.cross_output.copy_(self.draft_layer.cross.output)
            self.draft_layer.cross.output = self.cross_output

    def prepare(self, positions: int) -> None:
        if len(self.rope[0]) < positions:
            self.rope = rope_table(self.backbone.rotary_emb, self.model.lm_head.weight, positions)

    def embed(self, tokens: Tensor) -> ResidualStream:
        """A residual stream that starts with the embeddings of tokens [B, N]."""
        embedding = self.backbone.embed_tokens
        is_split = isinstance(embedding, VocabularyEmbedding)
        embeddings = embedding(tokens) if is_split else self.backend.embed(embedding.weight, tokens)
        return self.backend.stream(embeddings, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.lm_head
        logits = self.backend.linear(hidden, head.weight)
        return head.gathered(logits) if isinstance(head, VocabularyHead) else logits

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.backend.linear(hidden, weight, bias)

    def target(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: TargetCache,
        slots: Tensor,
        attend: Attend,
        states: LayerInputs | None = None,
    ) -> Tensor:
        stream = self.embed(tokens)
        project = partial(attend.project, scale=self.scale) if hasattr(attend, "project") else None
        for number, (layer, keys, values) in enumerate(zip(self.layers, cache.keys, cache.values, strict=True)):
            if states is not None and number in states.layers:
                states.kept[number] = stream.current()

            def attend_in_layer(q: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                return attend(q, keys, values, self.scale)

            store = TokenSlots(positions, self.rope, keys, values, slots, cache.selected)
            layer.add_to(stream, store, attend_in_layer, project)
        return stream.normed(self.backbone.norm.weight)

    def draft(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: DraftCache,
        first: int,
        self_attend: QueryAttend,
        cross_attends: Sequence[QueryAttend],
        feature: Tensor | None = None,
    ) -> Tensor:
        stream = self.embed(tokens)
        assert self.draft_layer is not None
        slots = cache.node_slots[:, first : first + tokens.shape[1]]
        store = TokenSlots(positions, self.rope, cache.keys, cache.values, slots)
        self.draft_layer.add_to(stream, store, self_attend, cross_attends, feature)
        return stream.hidden

    def feature(self, target_hidden: Tensor) -> Tensor:
        assert self.draft_layer is not None
        return self.draft_layer.feature(self.backend.stream(target_hidden, self.config.rms_norm_eps))

    def feed_draft(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: DraftCache) -> None:
        assert self.draft_layer is not None
        # Tokens with a negative slot are not stored.
        slots = torch.where(valid, positions % cache.window, -1)
        stream = self.embed(tokens)
        store = TokenSlots(positions.clamp(min=0), self.rope, cache.keys, cache.values, slots)
        self.draft_layer.store_keys_values(stream, store)


def make_runner(model: GlideMixin, attention: str, compiled: bool) -> Runner:
    """A fused runner if `compiled` is set and device, attention and layers allow it, else a plain one, with one warning
    on a CUDA device. Raises UserError for deterministic decoding without a fused runner."""
    backend, device = model_backend(model, attention), model.lm_head.weight.device
    fuses = compiled and can_fuse(model)
    if attention == DETERMINISTIC and not fuses:
        raise UserError(f"{DETERMINISTIC}: needs compile=True, and layers without adapters, hooks or quantization")
    if attention == DETERMINISTIC and model_parallel_rank_and_size()[1] > 1:
        raise UserError(f"{DETERMINISTIC}: not with a target that several ranks share")
    captures = device.type != "cuda" or (backend.capturable and backend.attention.capturable)
    if fuses and captures:
        return FusedRunner(model, backend)
    # On a GPU that runs plain torch the choice of the backend has logged the reason already.
    if compiled and device.type == "cuda" and plain_gpu(device) is None:
        reason = f"{type(model).__name__} with these layers" if captures else f"{backend.attention.name} attention"
        warn_once("no CUDA graphs: %s cannot be captured; decoding runs kernel by kernel", reason)
    return Runner(model, backend)
