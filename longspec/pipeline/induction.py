"""The target layer that the draft reads besides the last one, chosen by the target's induction heads.

A layer with an induction head has keys that say what comes before a token, so that a query for a token finds what
followed it earlier in the text. The draft's own attention can use these keys in the same way. The score of a layer is
the prefix-matching score of its best head (Olsson et al. 2022, "In-context Learning and Induction Heads"): on random
tokens that are repeated, the mean attention from a token to the one that followed its first occurrence, 0 to 1.

The rule of `best_layer` was made for two targets, in which it finds the layer that helps a draft most in trainings
(docs/draft.md). It has not been tested on others.
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

ROWS, LENGTH, SEED = 4, 128, 0
"""Rows of random tokens, tokens of a row before they are repeated, and the seed of all."""
LEAST, NEAR = 0.3, 0.8
"""The draft reads the last layer of the upper half whose score is at least LEAST and NEAR times the highest one there.
The last one, because later layers know more about the next token."""


def layer_file(root: Path) -> Path:
    return root / "layer.json"


def _scores(root: Path) -> list[float]:
    return json.loads(layer_file(root).read_text())


def write_layer(settings: Settings, root: Path) -> None:
    """Score the layers, unless an earlier run has, and print the chosen one."""
    if not layer_file(root).exists():
        share_work(measure_layers, settings, root, 1)
    scores = _scores(root)
    layer = best_layer(scores)
    found = "no layer of the upper half" if layer is None else f"layer {layer} (score {scores[layer]:.2f})"
    print(f"induction heads: {found}", flush=True)


def measure_layers(settings: Settings, root: Path, replicas: Replicas) -> None:
    """Write the scores of the target's layers."""
    scores = layer_scores(load_pair(settings.target, device=replicas.device(None))[0].model)
    write_atomically(layer_file(root), json.dumps(scores) + "\n")


def chosen_layer(root: Path) -> dict[str, Any]:
    """The trainer's values for the chosen layer; empty if there is none, so that its configuration decides."""
    layer = best_layer(_scores(root))
    return {} if layer is None else {"model.kv_layers": [layer]}


def layer_table(root: Path) -> pandas.DataFrame:
    """The scores of all layers."""
    scores = _scores(root)
    chosen = best_layer(scores)
    rows = [(layer, f"{score:.2f}", "yes" if layer == chosen else "") for layer, score in enumerate(scores)]
    return pandas.DataFrame(rows, columns=["layer", "score", "chosen"])


def best_layer(scores: list[float]) -> int | None:
    """The number of the layer to read, from 0; None if no layer of the upper half has an induction head. It is not the
    last layer, which a draft always reads."""
    upper = range(len(scores) // 2, len(scores) - 1)
    least = max([LEAST, *(NEAR * scores[layer] for layer in upper)])
    return max((layer for layer in upper if scores[layer] >= least), default=None)


@torch.no_grad()
def layer_scores(target: Any) -> list[float]:
    """The score of each layer of a target, a transformers model without its head."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(target.config.vocab_size, (ROWS, LENGTH), generator=generator).to(target.device)
    target.set_attn_implementation("eager")  # the others return no weights
    output = target(torch.cat([tokens, tokens], 1), output_attentions=True, use_cache=False)
    return [prefix_matching(attention) for attention in output.attentions]


def prefix_matching(attention: Tensor) -> float:
    """The score of a layer. attention: [B, H, 2 L, 2 L], the weights over earlier positions, on repeated tokens."""
    length = attention.shape[-1] // 2
    following = attention.diagonal(1 - length, -2, -1)[..., 1:]  # from L + i to i + 1
    return round(float(following.float().mean((0, 2)).max()), 4)
