"""The GLIDE layer: the whole draft model (LongSpec, arXiv 2502.17421; GLIDE, arXiv 2402.02082).

    x = E(tokens)
    h = x + SelfAttn(RMSNorm(x))      window W: the query at position i sees keys i - W … i
    h = h + CrossAttn(RMSNorm(h))     own queries over the target's last-layer keys and values
    h = h + SwiGLU(RMSNorm(h))
    logits = lm_head(h)               frozen, shared with the target; no final norm

The layer is the same for all families. Queries and keys are not normalized even if the target's are (Qwen3), because
the published drafts have no such weights; the query projection learns the scale of the target's keys.

Options extend the published layer (see `DraftOptions`). Additional cross-attentions read other layers of the
target: they take the same normalized input, and their outputs are added. A target feature W·RMSNorm(s) is added to h
before the cross-attention, where s is the target's last hidden state at the newest token whose keys the query sees.
The SwiGLU may be narrower than the target's.

A draft may have a vocabulary list (see `draft_vocabulary`). Its head then consists of these rows of lm_head.

The caller decides which keys a query sees: training passes attention over whole sequences, decoding attention over its
caches. The layer itself is the same in both.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from longspec.errors import UserError
from longspec.kernels.training.varlen_torch import on_flat
from longspec.models.draft import Draft, Options, Reads, Rope, TrainingPass

GLIDE = "glide"
"""Name of this architecture."""
WINDOW = 512
"""Default self-attention window W in tokens: a query sees itself and the W positions before it."""
SelfAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, T, D], k, v [B, K, T, D] of the same tokens) -> [B, H, T, D]"""
QueryAttend = Callable[[Tensor], Tensor]
"""(q [B, H, T, D]) -> [B, H, T, D], over keys and values that are already stored"""


@dataclass(frozen=True)
class DraftOptions(Options):
    """Options of GLIDE; the defaults are those of the published drafts."""

    architecture = GLIDE
    window: int = WINDOW
    kv_layers: tuple[int, ...] = ()
    """Target layers that the draft reads in addition to the last one (L - 1), which it always reads; in 0 … L - 2."""
    target_feature: bool = False
    """Whether the draft reads the target's last hidden state."""
    mlp_size: int | None = None
    """Intermediate size of the draft's MLP; None for the target's."""

    def __post_init__(self) -> None:
        layers, width = self.kv_layers, self.mlp_size
        is_list = isinstance(layers, tuple) and all(type(layer) is int and layer >= 0 for layer in layers)
        if not is_list or len(set(layers)) < len(layers):
            raise UserError("kv_layers: must be a list of distinct layers of the target, such as [10, 20]")
        if not isinstance(self.target_feature, bool):
            raise UserError("target_feature: must be true or false")
        if width is not None and not (type(width) is int and width >= 1):
            raise UserError("mlp_size: must be a positive whole number, or null for the target's intermediate size")
        super().__post_init__()

    def entries(self) -> dict[str, Any]:
        """The window, and the options that differ from those of the published drafts."""
        published = asdict(PUBLISHED)
        return {
            OPTION_KEYS[name]: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name == "window" or value != published[name]
        }

    def check_target(self, config: Any, source: str) -> None:
        last = config.num_hidden_layers - 1
        if missing := [layer for layer in self.kv_layers if layer >= last]:
            raise UserError(
                f"{source}: the draft's kv_layers contain layer {missing[0]}, but this target of {last + 1} layers "
                f"allows only layers below {last}; every draft reads layer {last}"
            )


PUBLISHED = DraftOptions()
OPTION_KEYS = {name: f"draft_{name}" for name in asdict(PUBLISHED)}
"""Keys of the options in a draft's `config.json` and in the metadata of its weight file."""
DEAD_WEIGHTS = {f"cross_attn.{p}_proj.{kind}" for p in "kv" for kind in ("weight", "bias")}
"""Weights in the published drafts that have no use: the cross-attention reads the target's keys and values."""


def check_window(window: int, depth: int, source: str) -> None:
    """Raise UserError unless a draft with self-attention window `window` can draft `depth` levels. The draft's cache
    holds `window` positions, and a round writes up to `depth` + 1 of them at once. source: name of the setting that
    determines the depth."""
    if window <= depth:
        raise UserError(
            f"{source}: {depth} levels, but the draft's window is {window} tokens; it must exceed the depth"
        )


def head_dim(config: Any) -> int:
    """Width D of one head: `config.head_dim` if it is set, else hidden_size / H."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [B, H, T, D]."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    return x * cos + rotate_half(x) * sin


class _Attention(nn.Module):
    """Query and output projections; q, k and v have biases, o has none."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # Biases as in the published drafts, whether or not the target's family has them.
        self.head_dim = head_dim(config)
        width = config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=True)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, H·D] -> [B, H, T, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        return rotate(self.split_heads(self.q_proj(x)), rope)

    def output(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class DraftSelfAttention(_Attention):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.num_key_value_heads * self.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=True)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, K, T, D]; they depend only on a token's embedding and position."""
        return rotate(self.split_heads(self.k_proj(x)), rope), self.split_heads(self.v_proj(x))

    def forward(self, x: Tensor, rope: Rope, attend: SelfAttend) -> Tensor:
        return self.output(attend(self.queries(x, rope), *self.keys_values(x, rope)))


class DraftCrossAttention(_Attention):
    def forward(self, x: Tensor, rope: Rope, attend: QueryAttend) -> Tensor:
        return self.output(attend(self.queries(x, rope)))


class GlideDecoderLayer(Draft):
    """One draft layer; the subclass of a family names its norm and MLP classes."""

    options_class = DraftOptions
    norm_class: Callable[..., nn.Module]
    mlp_class: Callable[..., nn.Module]

    def __init__(self, config: Any, options: DraftOptions = PUBLISHED) -> None:
        super().__init__(config, options)
        self.reads = Reads((config.num_hidden_layers - 1, *options.kv_layers), hidden=options.target_feature)

        # The names of these modules are those in the published weight files.
        norm = type(self).norm_class
        self.self_attn = DraftSelfAttention(config)
        self.cross_attn = DraftCrossAttention(config)
        mlp_config = copy.copy(config)
        mlp_config.intermediate_size = options.mlp_size or config.intermediate_size
        self.mlp = type(self).mlp_class(mlp_config)
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_self_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_cross_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

        # Extensions, which published drafts do not have.
        self.extra_cross_attn = nn.ModuleList(DraftCrossAttention(config) for _ in options.kv_layers)
        if options.target_feature:
            self.feature_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.feature_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @property
    def cross_attentions(self) -> list[DraftCrossAttention]:
        """The cross-attention to the target's last layer, then those to `options.kv_layers`."""
        return [self.cross_attn, *self.extra_cross_attn]  # type: ignore[list-item]

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if name not in DEAD_WEIGHTS}

    def keys_values(self, embeddings: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Self-attention keys and values of tokens with `embeddings` [B, T, hidden]. They do not depend on other
        tokens, so prefill computes nothing else of the draft."""
        return self.self_attn.keys_values(self.input_layernorm(embeddings), rope)

    def feature(self, target_hidden: Tensor) -> Tensor:
        """The feature [..., hidden] of the target's last hidden states [..., hidden]; 0 for a state of 0."""
        return self.feature_proj(self.feature_layernorm(target_hidden))

    def forward(
        self,
        embeddings: Tensor,
        rope: Rope,
        self_attend: SelfAttend,
        cross_attends: Sequence[QueryAttend],
        feature: Tensor | None = None,
    ) -> Tensor:
        """embeddings [B, T, hidden] -> hidden states [B, T, hidden], ready for lm_head.

        cross_attends: one function per layer of `cross_attentions`. feature: [B, T, hidden], or [B, 1, hidden] if it is
        the same for all tokens of a row; None without `options.target_feature`.
        """
        # E(tokens) is the target's embedding, which the draft shares.
        h = embeddings + self.self_attn(self.input_layernorm(embeddings), rope, self_attend)
        if feature is not None:
            # Before the cross-attention, so that its queries depend on the target's state.
            h = h + feature

        # All cross-attentions read the same normalized input, and their outputs are added.
        normed = self.post_self_attention_layernorm(h)
        for attention, attend in zip(self.cross_attentions, cross_attends, strict=True):
            h = h + attention(normed, rope, attend)

        return h + self.mlp(self.post_cross_attention_layernorm(h))

    def training_forward(self, given: TrainingPass, lags: Sequence[Tensor | None]) -> list[Tensor]:
        scale = self.self_attn.head_dim**-0.5  # scores are q · k / sqrt(D), as in the target
        windowed = partial(given.attention.varlen, segments=given.segments, scale=scale, window=self.window)

        def at(lags: Tensor | None) -> Tensor:
            # Lag s is the situation at level s - 1 of a tree in decoding, where the newest target key is s positions
            # before the query. In the block pattern the lags 1 to 4 alternate.
            seen = given.segments if lags is None else given.segments.lagging(lags.tolist())
            varlen = given.attention.block if lags is None else given.attention.varlen
            attention = partial(varlen, segments=seen, scale=scale)
            cross_attends = [partial(on_flat, attention, k=k, v=v) for k, v in given.target.keys_values]
            feature = self.feature(given.newest_hidden(lags)) if self.options.target_feature else None
            return self(given.embeddings, given.rope, partial(on_flat, windowed), cross_attends, feature)

        return [at(own) for own in lags]
