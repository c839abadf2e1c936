"""Tiny targets with drafts, for tests: random weights, both families, any head layout."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide

FAMILIES = ("llama", "qwen2")
OPTIONS = {
    "published": PUBLISHED,
    "kv_layers": DraftOptions(kv_layers=(1, 0)),
    "feature": DraftOptions(target_feature=True),
    "both": DraftOptions(kv_layers=(1,), target_feature=True),
}
"""Drafts for the targets of 3 layers."""
_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaGlide),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2Glide),
}


def tiny_config(family: str, **overrides: Any) -> LlamaConfig | Qwen2Config:
    """3 layers, GQA 4/2; wide initial weights, so that logits differ clearly between tokens."""
    settings: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return _CLASSES[family][0](**(settings | overrides))


def save_target(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A random target in transformers' own form."""
    torch.manual_seed(seed)
    _CLASSES[family][1](tiny_config(family, **overrides)).save_pretrained(folder)
    return folder


def make_pair(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    options: DraftOptions = PUBLISHED,
    **overrides: Any,
) -> GlideMixin:
    """A random target with a random draft, which decoding takes for a trained one."""
    save_target(folder, family, seed, **overrides)
    torch.manual_seed(seed + 1)
    model = _CLASSES[family][2].from_pretrained(folder, torch_dtype=dtype, **asdict(options))
    model.draft_is_trained = True
    return model


def target_greedy(model: GlideMixin, prompt: torch.Tensor, count: int) -> list[int]:
    """The target's own greedy tokens after prompt [P], by one full forward pass a token and no code of ours."""
    tokens = prompt[None].to(model.device)
    for _ in range(count):
        with torch.no_grad():
            logits = model(tokens).logits[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Handed:
    """An objective that hands over what `pick` makes of (draft hidden, target hidden, labels, lm_head)."""

    pick: Callable[..., Any]
    reads_target: bool = False

    def __call__(self, *given: Any) -> Any:
        return self.pick(*given)
