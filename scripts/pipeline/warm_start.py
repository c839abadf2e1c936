"""A draft that begins with what its target has learnt, instead of with noise.

Self-attention reads embeddings, as the target's first layer does; cross-attention and MLP write what lm_head reads, as
its last layer's do.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_folder

FROM_FIRST = {
    "input_layernorm": "input_layernorm",
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
}
FROM_LAST = {
    "post_self_attention_layernorm": "input_layernorm",
    **{f"cross_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qo"},
    "post_cross_attention_layernorm": "post_attention_layernorm",
    **{f"mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
WRITERS = ("self_attn.o_proj", "cross_attn.o_proj", "mlp.down_proj")
"""What adds to the embeddings. A target's last norm brings the sum to its weight's size, but a draft has none: with
them as they are in a target of 32 layers, KL began at 64 nats, from noise at 8."""


def write_warm_start(folder: Path, target: Path, window: int) -> None:
    """A draft of `target`'s shape in Hugging Face form, for a self-attention window of so many tokens."""
    config = AutoConfig.from_pretrained(target)
    # Not as a model: two threads at once must not do that, transformers changes its classes meanwhile.
    state = {name: weight for file in sorted(target.glob("*.safetensors")) for name, weight in load_file(file).items()}
    save_draft_folder(layers_of(state, config.num_hidden_layers), config, folder, DraftOptions(window))


def layers_of(target: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The weights of a draft layer, from those of a Llama or Qwen2 of so many layers.

    The WRITERS' are scaled: of entries of size 1 (RMS), each makes entries of the size that the last norm's have.
    """
    found = {}
    size = target["model.norm.weight"].float().square().mean().sqrt()
    for number, modules in ((0, FROM_FIRST), (layers - 1, FROM_LAST)):
        for name, source in modules.items():
            weight = target[f"model.layers.{number}.{source}.weight"]
            if name in WRITERS:
                weight = (weight * (size * len(weight) ** 0.5 / weight.float().norm().clamp(min=1e-9))).to(weight.dtype)
            found[f"{name}.weight"] = weight
            if "attn" in name and "o_proj" not in name:  # drafts have biases there, Llamas none
                bias = target.get(f"model.layers.{number}.{source}.bias")
                found[f"{name}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
    return found
