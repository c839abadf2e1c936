"""What every target trained from scratch has: its shape, a fresh model, the optimizer and the learning rate."""

from dataclasses import dataclass

import torch
from torch.optim import AdamW, Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

from scripts.pipeline.machine import gpus
from scripts.pipeline.muon import BatchedMuon

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
HEAD_DIM = 64


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target's model."""

    family: str = "llama"
    vocab_size: int = 3072
    hidden_size: int = 192
    intermediate_size: int = 576
    layers: int = 6
    kv_heads: int = 1
    positions: int = 4096
    rope_theta: float = 1e4


def fresh_target(shape: TargetShape, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A target with random weights, fp32."""
    config = CONFIGS[shape.family](
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden_size // HEAD_DIM,
        num_key_value_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=shape.positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # On a CPU plain matrix products are faster than fused attention, whose backward is slow there.
    attention = "sdpa" if gpus() else "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


class MuonWithAdamW(Optimizer):
    """Muon for the layers' matrices, AdamW for embeddings and norms.

    At a thousand steps or fewer Muon brings the loss down much further than AdamW alone.
    """

    def __init__(self, model: PreTrainedModel, matrix_lr: float, embedding_lr: float, momentum: float) -> None:
        layers = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.ndim == 2]
        rest = [weight for name, weight in model.named_parameters() if ".layers." not in name or weight.ndim != 2]
        self.parts = (
            BatchedMuon(layers, matrix_lr, momentum),
            AdamW(rest, embedding_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # Whoever prepares the optimizer may replace its groups, so the schedule's rates are handed on here.
        theirs = (group for part in self.parts for group in part.param_groups)
        for group, own in zip(theirs, self.param_groups, strict=True):
            group["lr"] = own["lr"]
        for part in self.parts:
            part.step()


def warm_up_hold_decay(step: int, warm_up: int, share: float) -> float:
    """The factor on the learning rate: it rises for `warm_up` steps, holds, and falls to 0 in a line from half way.

    share: of the training that is over before `step`, in 0 … 1.
    """
    return min(1.0, (step + 1) / warm_up, 2 * (1 - share))
