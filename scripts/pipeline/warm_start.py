"""A draft that begins with what its target has learnt, instead of with noise.

Self-attention reads embeddings, as the target's first layer does; cross-attention and MLP write what lm_head reads, as
its last layer's do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.models.draft_files import save_draft_folder


def write_warm_start(folder: Path, target: Path, window: int) -> None:
    """A draft of `target`'s shape in Hugging Face form, for a self-attention window of so many tokens."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    save_draft_folder(dict(layers_of(model.model)), model.config, folder, window)


def layers_of(backbone: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a draft layer by name, copies of a Llama's or Qwen2's."""
    first, last = backbone.layers[0], backbone.layers[-1]
    modules = {
        "input_layernorm": first.input_layernorm,
        **{f"self_attn.{name}_proj": getattr(first.self_attn, f"{name}_proj") for name in "qkvo"},
        "post_self_attention_layernorm": last.input_layernorm,
        **{f"cross_attn.{name}_proj": getattr(last.self_attn, f"{name}_proj") for name in "qo"},
        "post_cross_attention_layernorm": last.post_attention_layernorm,
        **{f"mlp.{name}_proj": getattr(last.mlp, f"{name}_proj") for name in ("gate", "up", "down")},
    }
    for name, module in modules.items():
        yield f"{name}.weight", module.weight.detach().clone()
        if "attn" in name and "o_proj" not in name:  # Llama's have no biases, drafts do
            bias = module.bias if module.bias is not None else module.weight.new_zeros(len(module.weight))
            yield f"{name}.bias", bias.detach().clone()
