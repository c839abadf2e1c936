"""The forward passes of decoding through transformers' own modules. `fused_runner` runs them in fewer kernels."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.inference.cache import DraftCache, SlotWriter, TargetCache
from longspec.inference.device import device_name
from longspec.kernels.backend import Backend
from longspec.kernels.choice import choose_backend
from longspec.kernels.shared.attention import Attend
from longspec.models.draft_layer import GlideDecoderLayer, QueryAttend, head_dim
from longspec.models.glide import GlideMixin
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.models.target_attention import LayerInputs, run_backbone


def model_backend(model: GlideMixin, attention: str = "auto") -> Backend:
    """The backend of a pair on its device. attention: "auto" or a name (see `choose_backend`)."""
    weight = model.lm_head.weight
    return choose_backend(attention, weight.device, weight.dtype, head_dim(model.config))


class Runner:
    """Forward passes of a target and its draft, on one backend."""

    capturable = False
    """Whether a CUDA graph may capture its passes."""
    owned: tuple[str, ...] = ("model",)
    """The attributes that hold weights."""

    def __init__(self, model: GlideMixin, backend: Backend | None = None) -> None:
        """backend: None for that of `model_backend`."""
        self.model = model
        self.config = model.config
        self.device = model.lm_head.weight.device
        self.dtype = model.lm_head.weight.dtype
        self.backend = backend or model_backend(model)
        self.attention = self.backend.attention

    @property
    def kind(self) -> Hashable:
        """All that its passes depend on, apart from the sizes of batches; of JSON values."""
        draft, kind = self.model.draft_model, self.device.type
        return (
            (type(self).__name__, self.backend.name, self.attention.name, str(self.dtype)),
            (self.capturable, device_name(self.device), torch.get_num_threads() if kind == "cpu" else None),
            # Libraries choose kernels by these settings.
            (torch.get_float32_matmul_precision(), torch.is_autocast_enabled(kind), torch.is_inference_mode_enabled()),
            (str(draft.options), None if draft.vocabulary is None else len(draft.vocabulary)),
            model_parallel_rank_and_size()[1],
        )

    @property
    def glide(self) -> GlideDecoderLayer:
        """The draft of a pair with GLIDE."""
        draft = self.model.draft_model
        assert isinstance(draft, GlideDecoderLayer)
        return draft

    def drop_weights(self) -> None:
        """Drop all weights. No pass may run until `take_weights` is called."""
        for name in self.owned:
            delattr(self, name)

    def take_weights(self, other: "Runner") -> None:
        """Take over the weights of another runner of the same type, which are at the same addresses as before."""
        for name in self.owned:
            setattr(self, name, getattr(other, name))

    def prepare(self, positions: int) -> None:
        """Build the tables for positions 0 ... positions - 1. Each engine calls it once, before its first pass."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head, which the draft shares: [B, N, hidden] -> [B, N, V]."""
        return self.model.lm_head(hidden)

    def product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A head of other rows: hidden [B, N, hidden], weight [C, hidden], bias [C] -> [B, N, C]."""
        return F.linear(hidden, weight, bias)

    def target(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: TargetCache,
        slots: Tensor,
        attend: Attend,
        states: LayerInputs | None = None,
    ) -> Tensor:
        """The target's hidden states [B, N, hidden] after the final norm. tokens, positions, slots: LongTensor [B, N].
        Each layer stores its keys and values in `slots` and then calls `attend` on all. states: see `LayerInputs`."""
        backbone: Any = self.model.model
        with (states or LayerInputs(())).recorded(backbone.layers):
            return run_backbone(backbone, tokens, positions, SlotWriter(cache, slots), attend)

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
        """The draft's hidden states [B, n, hidden] at the nodes first ... first + n - 1. The nodes' keys and values are
        stored in `cache` before `self_attend` is called. cross_attends, feature: see `GlideDecoderLayer.forward`."""
        embeddings, rope = self.model.embed(tokens, positions)

        def store_and_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write_nodes(k, v, first)
            return self_attend(q)

        return self.glide(embeddings, rope, store_and_attend, cross_attends, feature)

    def feature(self, target_hidden: Tensor) -> Tensor:
        """The target feature that the draft adds to its state: target_hidden [B, 1, hidden] -> the same shape."""
        return self.glide.feature(target_hidden)

    def feed_draft(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: DraftCache) -> None:
        """Store accepted tokens [B, T] at consecutive positions [B, T] in the draft's window, where `valid`."""
        embeddings, rope = self.model.embed(tokens, positions.clamp(min=0))
        keys, values = self.glide.keys_values(embeddings, rope)
        cache.append(keys, values, positions, valid)
