"""How a pair's forward passes run while decoding: through transformers' modules, or fused (`fused_runner`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from torch import Tensor

from longspec.inference.cache import DraftCache, TargetCache
from longspec.kernels.decoding.attention import decoding_attention
from longspec.models.draft_layer import head_dim
from longspec.models.glide import GlideMixin
from longspec.models.target_attention import Attend, QueryAttend, run_backbone

logger = logging.getLogger(__name__)


class Runner:
    """The passes of a target and its draft through transformers' modules, on one attention backend."""

    capturable = False
    """Whether its passes may be captured in a CUDA graph."""

    def __init__(self, model: GlideMixin, attention: str = "auto") -> None:
        """attention: "auto", "flash", "triton" or "sdpa" (see `kernels.attention.decoding_attention`)."""
        self.model, self.config = model, model.config
        weight = model.lm_head.weight
        self.device, self.dtype = weight.device, weight.dtype
        self.attention = decoding_attention(attention, self.device, self.dtype, head_dim(self.config))

    def prepare(self, positions: int) -> None:
        """Called once, before any pass: positions 0 … `positions` - 1 will occur."""
        self.positions = positions

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def target(self, tokens: Tensor, positions: Tensor, cache: TargetCache, attend: Attend) -> Tensor:
        """Hidden states [B, N, hidden], after the final norm; keys and values go to `cache.slots` before `attend`."""
        return run_backbone(self.model.model, tokens, positions, cache, attend)

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
        """The draft's hidden states [B, n, hidden]; nodes first … first + n - 1 are stored before `self_attend`.

        cross_attends, feature: see `GlideDecoderLayer.forward`.
        """
        embeddings, rope = self.model.embed(tokens, positions)

        def store_and_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write_nodes(k, v, first)
            return self_attend(q)

        return self.model.draft_model(embeddings, rope, store_and_attend, cross_attends, feature)

    def feature(self, target_hidden: Tensor) -> Tensor:
        """What the draft adds to its state for the target's hidden states [B, 1, hidden]; the same shape."""
        return self.model.draft_model.feature(target_hidden)

    def feed_draft(self, tokens: Tensor, positions: Tensor, valid: Tensor, cache: DraftCache) -> None:
        """Put accepted tokens [B, T] at consecutive positions [B, T] into the draft's ring, where valid."""
        embeddings, rope = self.model.embed(tokens, positions.clamp(min=0))
        cache.append(*self.model.draft_model.keys_values(embeddings, rope), positions, valid)


def make_runner(model: GlideMixin, attention: str, compiled: bool) -> Runner:
    """A fused runner where it is asked for and can be had; on a CUDA device that has to do without, it says why."""
    runner = Runner(model, attention)
    if not compiled or runner.device.type != "cuda":
        return runner
    if not runner.attention.capturable:
        _log_plain(f"{runner.attention.name} attention")
        return runner
    from longspec.inference.fused_runner import FusedRunner
    from longspec.models.fused import can_fuse

    if not can_fuse(model):
        _log_plain(f"{type(model).__name__} with these layers")
        return runner
    return FusedRunner(model, attention)


@cache
def _log_plain(reason: str) -> None:
    logger.warning("no CUDA graphs: %s cannot be captured; decoding runs kernel by kernel", reason)
