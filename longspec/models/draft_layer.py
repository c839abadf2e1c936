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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import rotate_half

from longspec.errors import UserError
from longspec.models.draft_vocabulary import MAPS, listed_tokens, vocabulary_maps

WINDOW = 512
"""Default self-attention window W in tokens: a query sees itself and the W positions before it."""
MAX_WINDOW = 2**20

Rope = tuple[Tensor, Tensor]
"""The target's rotary table at the tokens' positions: cos, sin, each [B, T, D]."""
SelfAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, T, D], k, v [B, K, T, D] of the same tokens) -> [B, H, T, D]"""
CrossAttend = Callable[[Tensor], Tensor]
"""(q [B, H, T, D]) -> [B, H, T, D], over the keys and values of one layer of the target"""


@dataclass(frozen=True)
class DraftOptions:
    """Options of a draft's architecture; the defaults are those of the published drafts."""

    window: int = WINDOW
    """Self-attention window W in tokens."""
    kv_layers: tuple[int, ...] = ()
    """Target layers that the draft reads in addition to the last one (L - 1), which it always reads; in 0 … L - 2."""
    target_feature: bool = False
    """Whether the draft reads the target's last hidden state."""
    mlp_size: int | None = None
    """Intermediate size of the draft's MLP; None for the target's."""

    def check_target(self, config: Any, source: str) -> None:
        """Raise UserError unless a target with `config` has the layers. source: name of the setting or the draft."""
        last = config.num_hidden_layers - 1
        if missing := [layer for layer in self.kv_layers if layer >= last]:
            raise UserError(
                f"{source}: the draft's kv_layers contain layer {missing[0]}, but this target of {last + 1} layers "
                f"allows only layers below {last}; every draft reads layer {last}"
            )


PUBLISHED = DraftOptions()
FIXED = ("kv_layers", "target_feature", "mlp_size")
"""Options on which the weights depend, so that they cannot change after the first stage."""


def check_window(window: int, depth: int, source: str) -> None:
    """Raise UserError unless a draft with self-attention window `window` can draft `depth` levels.

    The draft's cache holds `window` positions, and a round writes up to `depth` + 1 of them at once. source: name of
    the setting that determines the depth.
    """
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


def _with_mlp_size(config: Any, width: int | None) -> Any:
    if width is None:
        return config
    narrow = copy.copy(config)
    narrow.intermediate_size = width
    return narrow


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
    def forward(self, x: Tensor, rope: Rope, attend: CrossAttend) -> Tensor:
        return self.output(attend(self.queries(x, rope)))


class GlideDecoderLayer(nn.Module):
    """One draft layer; the subclass of a family names its norm and MLP classes."""

    d2t: Tensor | None
    t2d: Tensor | None
    norm_class: Callable[..., nn.Module]
    mlp_class: Callable[..., nn.Module]

    def __init__(self, config: Any, options: DraftOptions = PUBLISHED) -> None:
        super().__init__()
        self.options = options
        self.vocab_size: int = config.vocab_size
        # The vocabulary list; a draft without one has no such entries in its state dict.
        for name in MAPS:
            self.register_buffer(name, None)

        # The names of these modules are those in the published weight files.
        norm = type(self).norm_class
        self.self_attn = DraftSelfAttention(config)
        self.cross_attn = DraftCrossAttention(config)
        self.mlp = type(self).mlp_class(_with_mlp_size(config, options.mlp_size))
        self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_self_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_cross_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

        # Extensions, which published drafts do not have.
        self.extra_cross_attn = nn.ModuleList(DraftCrossAttention(config) for _ in options.kv_layers)
        if options.target_feature:
            self.feature_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.feature_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @property
    def window(self) -> int:
        """Self-attention window W in tokens; unlike the other options it can be changed."""
        return self.options.window

    @window.setter
    def window(self, tokens: int) -> None:
        self.options = replace(self.options, window=tokens)

    @property
    def vocabulary(self) -> Tensor | None:
        """The token ids that the draft proposes, LongTensor [Vd], ascending; None for the whole vocabulary."""
        return None if self.d2t is None else listed_tokens(self.d2t)

    def set_vocabulary(self, tokens: Tensor | None) -> None:
        """Restrict the draft to `tokens`, ascending ids, LongTensor [Vd]; None lifts the restriction."""
        maps = (
            {} if tokens is None else vocabulary_maps(tokens.to(self.self_attn.q_proj.weight.device), self.vocab_size)
        )
        for name in MAPS:
            self.register_buffer(name, maps.get(name))

    @property
    def cross_attentions(self) -> list[DraftCrossAttention]:
        """The cross-attention to the target's last layer, then those to `options.kv_layers`."""
        return [self.cross_attn, *self.extra_cross_attn]  # type: ignore[list-item]

    def reset_parameters(self, std: float) -> None:
        """A fresh draft: weights N(0, std), biases 0, norms 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "layernorm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def keys_values(self, embeddings: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Self-attention keys and values of tokens with `embeddings` [B, T, hidden].

        They do not depend on other tokens, so prefill computes nothing else of the draft.
        """
        return self.self_attn.keys_values(self.input_layernorm(embeddings), rope)

    def feature(self, target_hidden: Tensor) -> Tensor:
        """The feature [..., hidden] of the target's last hidden states [..., hidden]; 0 for a state of 0."""
        return self.feature_proj(self.feature_layernorm(target_hidden))

    def forward(
        self,
        embeddings: Tensor,
        rope: Rope,
        self_attend: SelfAttend,
        cross_attends: Sequence[CrossAttend],
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
