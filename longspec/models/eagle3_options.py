"""The options of EAGLE-3 drafts, and the `config.json` in which they are published."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspec.errors import UserError
from longspec.models.draft import Options
from longspec.models.draft_layer import head_dim

PUBLISHED_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
"""Names of the architecture in published files. Ours have the first one."""
SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SWITCHES = ("attention_bias", "norm_before_residual", "fc_norm", "norm_output")
TARGET_KEYS = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of `config.json` that have the target's values."""
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Options(Options):
    """Options of EAGLE-3. A size of None is the target's."""

    architecture = "eagle3"
    layers: tuple[int, ...] = ()
    """Target layers whose inputs are fused; empty for the published choice, 2, L / 2 and L - 3."""
    steps: int = 7
    """Steps of the training-time test, the largest trained lag."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    rope: dict[str, Any] | None = None
    """`rope_parameters` of transformers; None for the target's."""
    attention_bias: bool = False
    norm_before_residual: bool = False
    """Whether the residual is the normalized state."""
    fc_norm: bool = False
    """Whether the input of each target layer is normalized before `fc`."""
    norm_output: bool = False
    """Whether the next step reads the normalized state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("steps", *SHAPE):
            value = getattr(self, name)
            if not (type(value) is int and value >= 1) and (name == "steps" or value is not None):
                raise UserError(f"{name}: {value!r}; it must be a positive whole number")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}: must be true or false")
        if not isinstance(self.layers, tuple) or not all(type(layer) is int and layer >= 0 for layer in self.layers):
            raise UserError("layers: must be a list of layers of the target, such as [2, 14, 25]")
        if self.rope is not None and not (isinstance(self.rope, dict) and "rope_theta" in self.rope):
            raise UserError("rope: must be a mapping, such as {rope_type: default, rope_theta: 10000.0}")
        if self.rms_norm_eps is not None and not isinstance(self.rms_norm_eps, float):
            raise UserError("rms_norm_eps: must be a number")

    def check_target(self, config: Any, source: str) -> None:
        if missing := [layer for layer in self.layers if layer >= config.num_hidden_layers]:
            most = config.num_hidden_layers - 1
            raise UserError(f"{source}: the draft reads layer {missing[0]}, but this target has the layers 0 … {most}")
        own = self.config(config)
        heads, kv_heads, size = own.num_attention_heads, own.num_key_value_heads, head_dim(own)
        if heads % kv_heads:
            raise UserError(f"{source}: {heads} attention heads are no multiple of {kv_heads} key-value heads")
        if size < 1 or size % 2:
            raise UserError(f"{source}: head_dim is {size}; rotary positions need a positive even number")

    def check_fresh(self, config: Any, source: str) -> None:
        if self.hidden_size not in (None, config.hidden_size):
            raise UserError(
                f"{source}.hidden_size: {self.hidden_size}; a fresh draft starts with the target's head, which has "
                f"{config.hidden_size}; omit it"
            )

    def target_layers(self, target: Any) -> tuple[int, ...]:
        """The layers whose inputs are fused, of a target with the configuration `target`."""
        last = target.num_hidden_layers - 1
        return self.layers or (min(2, last), target.num_hidden_layers // 2, max(0, last - 2))

    def config(self, target: Any) -> Any:
        """The draft's configuration, as of a model of one layer, for a target with the configuration `target`."""
        own = copy.copy(target)
        for name in (*SHAPE, "rms_norm_eps"):
            if (value := getattr(self, name)) is not None:
                setattr(own, name, value)
        if self.head_dim is None and None not in (self.hidden_size, self.num_attention_heads):
            own.head_dim = own.hidden_size // own.num_attention_heads
        if self.rope is not None:
            own.rope_parameters = self.rope
        own.hidden_act, own.mlp_bias, own.num_hidden_layers = "silu", False, 1
        return own


def published_options(config: Mapping[str, Any], prefix: str) -> Eagle3Options:
    """The options of a published draft from its `config.json`. prefix: precedes names in errors. Raises UserError."""
    inner = config.get("transformer_layer_config")  # of the speculators library
    stated: dict[str, Any] = {**config, **(inner if isinstance(inner, Mapping) else {})}
    if stated.get("num_hidden_layers", 1) != 1 or stated.get("norm_before_fc"):
        raise UserError(f"{prefix}config.json: several layers or norm_before_fc; eagle3 drafts have neither here")
    names = (*SHAPE, "rms_norm_eps", *SWITCHES)
    options = {name: stated[name] for name in names if stated.get(name) is not None}
    if "speculators_model_type" in stated:
        options.setdefault("norm_before_residual", True)
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {"rope_type": "default"}
    if isinstance(rope, Mapping):
        kind = {"rope_type": rope.get("type", "default")}  # older files have the key `type`
        rope = {"rope_theta": stated.get("rope_theta", 10000.0), **kind, **rope}
    options["rope"] = rope
    # vLLM counts layers whose inputs are read, SGLang those whose outputs are.
    eagle = stated.get("eagle_config")
    outputs = eagle.get(LAYERS_KEY) if isinstance(eagle, Mapping) else None
    options["layers"] = stated.get(LAYERS_KEY) or [layer + 1 for layer in outputs or ()]
    return Eagle3Options.checked(options, prefix)


def published_config(target: Any, options: Eagle3Options, listed: int) -> dict[str, Any]:
    """The `config.json` of a draft in the published form. target: its configuration. listed: rows of the head."""
    own = options.config(target)
    content = {
        name: getattr(own, name)
        for name in (*SHAPE, "rms_norm_eps", *TARGET_KEYS, "rope_parameters")
        if getattr(own, name, None) is not None
    }
    content |= {name: getattr(options, name) for name in SWITCHES}
    rope = own.rope_parameters
    content |= {"rope_theta": rope["rope_theta"], "head_dim": head_dim(own)}
    content["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    content |= {"num_hidden_layers": 1, "hidden_act": "silu", "mlp_bias": False, "tie_word_embeddings": False}
    content |= {"target_hidden_size": target.hidden_size, "draft_vocab_size": listed}
    if options.layers:
        outputs = [layer - 1 for layer in options.layers]
        content |= {LAYERS_KEY: list(options.layers), "eagle_config": {LAYERS_KEY: outputs}}
    return {"architectures": [PUBLISHED_NAMES[0]], "model_type": "llama", **content}
