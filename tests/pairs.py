"""Tiny targets with drafts, for tests: random weights, every family, any head layout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from longspec.models import families
from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.models.glide import GlideMixin

FAMILIES = tuple(families.FAMILIES)
GLIDE: dict[str, Any] = {family: families.class_of(family) for family in FAMILIES}
"""The pair class of each family."""
OPTIONS = {
    "published": PUBLISHED,
    "kv_layers": DraftOptions(kv_layers=(1, 0)),
    "feature": DraftOptions(target_feature=True),
    "both": DraftOptions(kv_layers=(1,), target_feature=True, mlp_size=48),
}
"""Drafts for the targets of 3 layers."""
OWN_SETTINGS: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}
"""Settings of a family's tiny config. Qwen3's heads are wider than hidden_size / heads, as in the real ones."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """3 layers, GQA 4/2; wide initial weights, so that logits differ clearly between tokens."""
    settings: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    settings |= {"initializer_range": 0.3, "tie_word_embeddings": False}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return GLIDE[family].target_class.config_class(**(settings | OWN_SETTINGS.get(family, {}) | overrides))


def save_target(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Path:
    """A random target in transformers' own form; weights of norms over heads differ from 1."""
    torch.manual_seed(seed)
    target = GLIDE[family].target_class(tiny_config(family, **overrides))
    for name, weight in target.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    target.save_pretrained(folder)
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
    model = GLIDE[family].from_pretrained(folder, torch_dtype=dtype, **asdict(options))
    model.draft_is_trained = True
    return model


def spread(model: nn.Module) -> None:
    """Add noise to biases, which are 0 in a random model, and to norms, which are 1, which would hide a missing one."""
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)


def padded(rows: Sequence[torch.Tensor], side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of rows of tokens, padded on a side."""
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_side=side)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    return ids, mask


def ragged_prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Token ids and mask, padded on the right, and the rows alone."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [torch.randint(1, 61, (n,), generator=generator) for n in lengths]
    return *padded(rows), rows


def every_turn(plans: int) -> Iterator[int]:
    """Numbers below `plans` without end, in an order in which each one follows every other one."""
    return cycle([number for first in range(plans) for second in range(first + 1, plans) for number in (first, second)])


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

    def __call__(self, *given: Any) -> Any:
        return self.pick(*given[:4])
