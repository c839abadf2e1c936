"""Targets of published shapes with random weights, made on the device: speed depends on shapes alone."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from longspec.models.families import family_class
from longspec.models.glide import GlideMixin


def _shape(
    config: Callable[..., PreTrainedConfig],
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    positions: int,
    rope_theta: float = 1e6,
    **others: Any,
) -> Any:
    return config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        **others,
    )


SHAPES: dict[str, PreTrainedConfig] = {
    "llama3-8b": _shape(LlamaConfig, 128256, 4096, 14336, 32, 32, 8, 1 << 19, 283461213.0, rms_norm_eps=1e-5),
    "qwen2-7b": _shape(Qwen2Config, 152064, 3584, 18944, 28, 28, 4, 1 << 17),
    "qwen2.5-coder-1.5b": _shape(Qwen2Config, 151936, 1536, 8960, 28, 12, 2, 1 << 15),
    "qwq-32b": _shape(Qwen2Config, 152064, 5120, 27648, 64, 40, 8, 1 << 18, rms_norm_eps=1e-5),
    "qwen3-8b": _shape(Qwen3Config, 151936, 4096, 12288, 36, 32, 8, 1 << 17, head_dim=128),
    "qwen3-32b": _shape(Qwen3Config, 151936, 5120, 25600, 64, 64, 8, 1 << 17, head_dim=128),
    # For machines without a GPU: to run a benchmark, not to measure anything.
    "tiny": _shape(LlamaConfig, 512, 64, 128, 3, 4, 2, 1 << 16, 1e4),
}


def random_pair(name: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> GlideMixin:
    """The pair of shape SHAPES[name]; of ranks that share a target each makes its own part."""
    config = SHAPES[name]
    family: Any = family_class(config, name)

    def random_target(self: GlideMixin, config: Any, path: str, options: dict[str, Any]) -> PreTrainedModel:
        return family.target_class._from_config(config, dtype=options["dtype"])

    made = type(f"Random{family.__name__}", (family,), {"_read_target": random_target})
    with torch.device(device):
        pair = made(config, name, torch_dtype=dtype, attn_implementation="flash_attention_2").eval()
    pair.draft_is_trained = True  # for decoding
    return pair
