"""Targets of published shapes with random weights, made on the device: speed depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from longspec.models.families import family_class
from longspec.models.glide import GlideMixin

LLAMA3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=1 << 19,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 283461213.0},
)
QWQ_32B = Qwen2Config(
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    max_position_embeddings=1 << 18,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
QWEN2_7B = Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=1 << 17,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
QWEN2_CODER_1_5B = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=1 << 15,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 17,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
QWEN3_32B = Qwen3Config(
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_hidden_layers=64,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 17,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1 << 16,
    tie_word_embeddings=False,
)
"""For machines without a GPU: to run a benchmark, not to measure anything."""
SHAPES: dict[str, PreTrainedConfig] = {
    "llama3-8b": LLAMA3_8B,
    "qwen2-7b": QWEN2_7B,
    "qwen2.5-coder-1.5b": QWEN2_CODER_1_5B,
    "qwq-32b": QWQ_32B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    "tiny": TINY,
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
