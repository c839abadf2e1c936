"""A tiny target with a published EAGLE-3 draft, and what vLLM 0.26 computes with it, for tests."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pairs import GLIDE, save_target
from torch import Tensor

from longspec.models.draft_vocabulary import vocabulary_maps
from longspec.models.glide import GlideMixin

HIDDEN, VOCAB, LISTED, HEADS, KV_HEADS, WIDTH = 32, 61, 40, 4, 2, 40
EPS = 1e-5
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "vocab_size": VOCAB,
    "draft_vocab_size": LISTED,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""As SafeAILab publishes it, without a rope_theta."""


def published_weights(layer: str = "midlayer") -> dict[str, Tensor]:
    """Random weights under the published names."""
    generator = torch.Generator().manual_seed(3)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (LISTED, HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HIDDEN, 2 * HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (WIDTH, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (WIDTH, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDTH),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in norms}
    weights = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights |= {name: weight + 1 for name, weight in weights.items() if weight.ndim == 1}
    listed = torch.randperm(VOCAB, generator=generator)[:LISTED].sort().values
    return weights | vocabulary_maps(listed, VOCAB)


def published_pair(folder: Path, family: str = "llama", window: int | None = None, **options: Any) -> GlideMixin:
    """A target with a published draft, with another window and other options of it."""
    save_target(folder, family, initializer_range=0.1)
    draft = folder / "eagle"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(CONFIG | options))
    torch.save(published_weights(), draft / "pytorch_model.bin")
    pair = GLIDE[family].from_pretrained(folder, glide_path=draft, torch_dtype=torch.float32)
    pair.draft_model.window = window or pair.draft_model.window
    return pair


def random_tokens(*shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(7))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, D] with rotary embedding of theta 10000, the halves of a head as pairs."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.split(half, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Reference:
    """What vLLM 0.26 computes (models/llama_eagle3.py and the proposer of v1/spec_decode), on one text.

    A draft over a growing cache; tokens come in with the states that they are paired with, and their positions."""

    def __init__(self, weights: dict[str, Tensor], embedding: Tensor, switches: dict[str, bool]) -> None:
        self.w, self.embedding, self.switches = weights, embedding, switches
        self.keys = self.values = torch.zeros(0, KV_HEADS, HIDDEN // HEADS)

    def run(self, tokens: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and the next states [T, hidden] for tokens [T] and states [T, hidden]."""
        w, layer = self.w, "midlayer."
        normed = norm(states, w[layer + "hidden_norm.weight"])
        residual = normed if self.switches.get("norm_before_residual") else states
        x = torch.cat([norm(self.embedding[tokens], w[layer + "input_layernorm.weight"]), normed], -1)
        q, k, v = (x @ w[f"{layer}self_attn.{name}_proj.weight"].T for name in "qkv")
        q, k, v = (y.view(len(tokens), -1, HIDDEN // HEADS) for y in (q, k, v))
        self.keys = torch.cat([self.keys, rotated(k, positions)])
        self.values = torch.cat([self.values, v])
        keys, values = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (self.keys, self.values))
        scores = torch.einsum("thd,shd->hts", rotated(q, positions), keys) * (HIDDEN // HEADS) ** -0.5
        seen = torch.arange(len(keys)) <= torch.arange(len(keys) - len(tokens), len(keys))[:, None]
        heads = torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        residual = residual + heads.flatten(1) @ w[layer + "self_attn.o_proj.weight"].T
        x = norm(residual, w[layer + "post_attention_layernorm.weight"])
        gate, up = (x @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        state = residual + (F.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
        output = norm(state, w["norm.weight"])
        logits = torch.full((len(tokens), VOCAB), -torch.inf)
        logits[:, torch.arange(LISTED) + w["d2t"]] = output @ w["lm_head.weight"].T
        return logits, output if self.switches.get("norm_output") else state

    def chain(self, prompt: Tensor, aux: Tensor, nodes: Tensor) -> list[Tensor]:
        """Logits [V] after each of `nodes`, the root first. aux: the target's states [P, 3 · hidden] of the prompt."""
        fused = aux @ self.w["fc.weight"].T
        tokens = torch.cat([prompt[1:], nodes[:1]])  # shifted by one against the states
        logits, states = self.run(tokens, fused, torch.arange(len(prompt)))
        chain = [logits[-1]]
        for step, token in enumerate(nodes[1:], len(prompt)):
            logits, states = self.run(token[None], states[-1:], torch.tensor([step]))
            chain.append(logits[-1])
        return chain
