"""The EAGLE-3 draft (arXiv 2503.01840), in the form that its authors, SpecForge and the speculators library publish.

    f_i = fc(h_i)                       h_i: the inputs of three layers of the target at token i, next to each other
    x_i = [RMSNorm(E(t_i)), RMSNorm(g)]   g = f_(i - 1), or a_(i - 1) if the target has not read token i - 1
    r = g + SelfAttn(x_i)               keys and values of the tokens 1 … i
    a_i = r + SwiGLU(RMSNorm(r))
    logits = lm_head(RMSNorm(a_i))      own head over the draft's vocabulary

Token i has the rotary position i - 1, that of the state it is read with. Keys and values of a token that the target has
read depend on its embedding and on f alone, so a prompt costs two projections per token.

Training runs the steps of decoding one after another (training-time test). In step s the query at i reads the state of
step s - 1 at i - 1. It sees the keys of step 1 up to token i - s + 1, then those of step m at token i - s + m. Step s
is the lag s.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from longspec.errors import UserError
from longspec.kernels.shared.device import upload
from longspec.kernels.training.segments import Segments
from longspec.kernels.training.varlen_torch import flattened
from longspec.models.draft import Draft, Reads, TrainingPass
from longspec.models.draft_layer import DraftSelfAttention, head_dim
from longspec.models.eagle3_options import PUBLISHED_NAMES, Eagle3Options, published_config, published_options

STEP_DECAY = 0.8
"""Weight of the loss of a step relative to that of the step before."""
EMBEDDING = "embed_tokens.weight"


class _SelfAttention(DraftSelfAttention):
    def __init__(self, config: Any, bias: bool) -> None:
        nn.Module.__init__(self)  # the projections have other widths and another order
        self.head_dim = head_dim(config)
        width, kv_width = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class _RMSNorm(LlamaRMSNorm):
    """Two launches on a GPU from torch 2.9 on. Transformers' eight take the host longer than the GPU."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        # Rounded before the product with the weight, as in decoding.
        return self.weight * F.rms_norm(hidden_states, self.weight.shape, eps=self.variance_epsilon)


class _Layer(nn.Module):
    def __init__(self, config: Any, bias: bool) -> None:
        super().__init__()
        norms = [_RMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)]
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn = _SelfAttention(config, bias)
        self.mlp = LlamaMLP(config)


class Eagle3Draft(Draft):
    """The names of its modules are those in the published weight files."""

    options_class = Eagle3Options
    published_names = PUBLISHED_NAMES
    published_options = staticmethod(published_options)

    def __init__(self, config: Any, options: Eagle3Options) -> None:
        super().__init__(config, options)
        self.config = options.config(config)
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        layers = options.target_layers(config)
        self.reads = Reads(layer_inputs=layers)
        self.trained_lags = options.steps
        self.lag_weights = [STEP_DECAY**step for step in range(options.steps)]
        self.midlayer = _Layer(self.config, options.attention_bias)
        self.fc = nn.Linear(len(layers) * config.hidden_size, hidden, bias=False)
        self.fc_norm: nn.ModuleList | None = None
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(_RMSNorm(config.hidden_size, eps=eps) for _ in layers)
        self.norm = _RMSNorm(hidden, eps=eps)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.embed_tokens: nn.Embedding | None = None
        """The draft's own embedding, which does not train; None if it is the target's."""
        self.has_own_width = hidden != config.hidden_size
        # In a tuple, because a cast of a submodule to bf16 would shift distant positions.
        self.rotary = (LlamaRotaryEmbedding(self.config),)

    @property
    def head(self) -> nn.Linear:
        return self.lm_head

    def set_vocabulary(self, tokens: Tensor | None) -> None:
        is_whole, weight = self.d2t is None, self.lm_head.weight
        super().set_vocabulary(tokens)
        rows = self.vocab_size if tokens is None else len(tokens)
        if rows == len(weight):
            return
        self.lm_head = nn.Linear(weight.shape[1], rows, bias=False, device=weight.device, dtype=weight.dtype)
        self.lm_head.weight.requires_grad_(weight.requires_grad)
        if is_whole and tokens is not None:  # else `load` follows
            with torch.no_grad():
                self.lm_head.weight.copy_(weight[tokens.to(weight.device)])

    def start_from_target(self, target: Any) -> None:
        """The head starts as the target's."""
        weight = target.lm_head.weight
        if weight.shape != self.lm_head.weight.shape:
            raise UserError(
                "architecture: a fresh eagle3 draft starts with the target's whole head; use ZeRO stage 1 or 2, "
                "tp_size=1 and the target's hidden_size"
            )
        with torch.no_grad():
            self.lm_head.weight.copy_(weight)

    # Files

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        used = {name: weight for name, weight in weights.items() if "rotary_emb" not in name}
        return {name.removeprefix("model.").replace("layers.0.", "midlayer."): w for name, w in used.items()}

    def shapes(self, weights: Mapping[str, Tensor], listed: int | None) -> dict[str, torch.Size]:
        width = self.config.hidden_size
        own = {"lm_head.weight": torch.Size((listed or self.vocab_size, width))}
        if EMBEDDING in weights or self.has_own_width:
            own[EMBEDDING] = torch.Size((self.vocab_size, width))
        # The draft that these weights replace may have had an embedding.
        current = super().shapes(weights, listed)
        return {name: shape for name, shape in current.items() if name != EMBEDDING} | own

    def load(self, weights: Mapping[str, Tensor], tokens: Tensor | None, target: Any) -> None:
        theirs, own = target.model.embed_tokens.weight, weights.get(EMBEDDING)
        self.embed_tokens = None
        if own is not None and torch.equal(own.to(theirs.device, theirs.dtype), theirs):
            weights = {name: weight for name, weight in weights.items() if name != EMBEDDING}
        elif own is not None:
            where: dict[str, Any] = {"device": self.fc.weight.device, "dtype": self.fc.weight.dtype}
            self.embed_tokens = nn.Embedding(*own.shape, **where).requires_grad_(False)
        super().load(weights, tokens, target)

    @classmethod
    def folder_config(cls, config: Any, options: Any, state: Mapping[str, Tensor]) -> dict[str, Any]:
        head = state["lm_head.weight"]
        return published_config(config, options, len(head)) | {"torch_dtype": str(head.dtype).removeprefix("torch.")}

    # The layer

    def embed(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """The draft's own embeddings [B, T, hidden] of tokens, or else the target's, `embeddings`."""
        return embeddings if self.embed_tokens is None else self.embed_tokens(tokens)

    def fuse(self, states: Tensor) -> Tensor:
        """f [B, T, hidden] of the target's states [B, T, n · hidden]."""
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The residual and the attention's input x [B, T, 2 · hidden]. embedded: RMSNorm(E(t)), states: g, both
        [B, T, hidden]."""
        normed = self.midlayer.hidden_norm(states)
        x = torch.cat([embedded, normed], -1)
        return (normed if self.options.norm_before_residual else states), x

    def outputs(self, residual: Tensor, heads: Tensor) -> tuple[Tensor, Tensor]:
        """The state that the next step reads and the input of the head, [B, T, hidden] each. heads: [B, H, T, D]."""
        h = residual + self.midlayer.self_attn.output(heads)
        state = h + self.midlayer.mlp(self.midlayer.post_attention_layernorm(h))
        normed = self.norm(state)
        return (normed if self.options.norm_output else state), normed

    # Training

    def training_forward(self, given: TrainingPass, lags: Sequence[Tensor | None]) -> list[Tensor]:
        shape, segments = given.tokens.shape, given.segments
        # No entry is None (the block pattern), because `trained_lags` is set.
        lags_of_segments = [own for own in lags if own is not None]
        assert given.target.layer_inputs is not None
        is_first = (segments.offsets == 0).view(shape)[..., None]
        rope = self.rotary[0](given.embeddings, (given.positions - 1).clamp(min=0))
        embedded = self.midlayer.input_layernorm(self.embed(given.tokens, given.embeddings))
        states = self.fuse(given.target.layer_inputs)
        attention, predicted = self.midlayer.self_attn, []
        scale = attention.head_dim**-0.5
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(max(int(own.max()) for own in lags_of_segments)):
            # The first token of a segment has no state before it.
            before = states.roll(1, 1).masked_fill(is_first, 0)
            residual, x = self.inputs(embedded, before)
            q, k, v = map(flattened, (attention.queries(x, rope), *attention.keys_values(x, rope)))
            keys.append(k)
            values.append(v)
            heads = given.attention.steps(q, keys, values, segments, scale, self.window)
            states, normed = self.outputs(residual, heads.unflatten(0, shape).transpose(1, 2))
            predicted.append(normed)
        return [_at_lags(predicted, own, segments) for own in lags_of_segments]


def _at_lags(predicted: Sequence[Tensor], lags: Tensor, segments: Segments) -> Tensor:
    """Of the hidden states [B, T, hidden] of all steps, at each token those of its segment's lag, LongTensor [M]."""
    first, *others = lags.unique().tolist()
    chosen = predicted[first - 1]
    if others:
        token_lags = upload(segments.token_lags(lags), chosen.device).view(chosen.shape[:2])[..., None]
    for lag in others:
        chosen = torch.where(token_lags == lag, predicted[lag - 1], chosen)
    return chosen
