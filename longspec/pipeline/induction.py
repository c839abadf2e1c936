"""The target layer that the draft reads besides the last one, chosen by the target's induction heads.

A layer with an induction head has keys that say what comes before a token, so that a query for a token finds what
followed it earlier in the text. The draft's own attention can use these keys alike. In docs/reproduce.md, the layers
that help a draft most have the strongest such heads. The score of a layer is the prefix-matching score
of its best head (Olsson et al. 2022, "In-context Learning and Induction Heads"): on random tokens that are repeated,
the mean attention from a token to the one that followed its first occurrence, 0 to 1.
"""

import json
from pathlib import Path
from typing import Any

import pandas
import torch
from torch import Tensor

from longspec.inference.load_pair import load_pair
from longspec.pipeline.processes import share_work
from longspec.pipeline.settings import Settings
from longspec.ranks.replicas import Replicas
from longspec.replacing import write_atomically

ROWS, LENGTH = 4, 128
"""Rows of random tokens, and tokens of a row before they are repeated."""
NEAR = 0.8
"""The last layer of the upper half is read whose score is at least this part of the highest one there: later layers
also know more about the next token."""


def layer_file(root: Path) -> Path:
    return root / "layer.json"


def write_layer(settings: Settings, root: Path) -> None:
    """Choose the layer, unless it is chosen."""
    if not layer_file(root).exists():
        share_work(measure_layers, settings, root, 1)
    chosen = json.loads(layer_file(root).read_text())
    print(f"stage 1 reads layer {chosen['layer']} (score {chosen['scores'][chosen['layer']]:.2f})", flush=True)


def measure_layers(settings: Settings, root: Path, replicas: Replicas) -> None:
    """Score the layers of the target and choose one."""
    scores = layer_scores(load_pair(settings.target, device=replicas.device(None))[0].model, settings.seed)
    write_atomically(layer_file(root), json.dumps({"layer": best_layer(scores), "scores": scores}) + "\n")


def chosen_layer(root: Path) -> dict[str, Any]:
    """The trainer's values of the chosen layer."""
    return {"model.kv_layers": [json.loads(layer_file(root).read_text())["layer"]]}


def layer_table(root: Path) -> pandas.DataFrame:
    """The scores of all layers, and which one stage 1 reads."""
    chosen = json.loads(layer_file(root).read_text())
    rows = [
        {"layer": layer, "score": f"{score:.2f}", "read": "yes" if layer == chosen["layer"] else ""}
        for layer, score in enumerate(chosen["scores"])
    ]
    return pandas.DataFrame(rows)


def best_layer(scores: list[float]) -> int:
    """The number of the layer to read, from 0. It is not the last one, which a draft always reads."""
    upper = range(len(scores) // 2, len(scores) - 1)
    highest = max(scores[layer] for layer in upper)
    return max(layer for layer in upper if scores[layer] >= NEAR * highest)


@torch.no_grad()
def layer_scores(target: Any, seed: int) -> list[float]:
    """The score of each layer of a target, a transformers model without its head."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(target.config.vocab_size, (ROWS, LENGTH), generator=generator).to(target.device)
    target.set_attn_implementation("eager")  # the others return no weights
    output = target(torch.cat([tokens, tokens], 1), output_attentions=True, use_cache=False)
    return [prefix_matching(attention) for attention in output.attentions]


def prefix_matching(attention: Tensor) -> float:
    """The score of a layer. attention: [B, H, 2 L, 2 L], the weights over earlier positions, on repeated tokens."""
    length = attention.shape[-1] // 2
    following = attention.diagonal(1 - length, -2, -1)[..., 1:]  # from L + i to i + 1
    return round(float(following.float().mean((0, 2)).max()), 4)
