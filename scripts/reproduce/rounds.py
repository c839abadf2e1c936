"""Where the time of a tree round goes, by context, and what hybrid attention saves of it."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import captured_ms, measure_ceilings
from longspec.inference.select_runner import make_runner
from longspec.kernels.decoding.attention import decoding_attention
from longspec.kernels.decoding.attention_interface import DecodingAttention
from longspec.models.draft_layer import head_dim
from scripts.reproduce.pair import LoadedPair

RUNS = 5
MASK_ALIGNMENT = 16
"""Slots that a mask's row is a multiple of, or torch copies it at every call."""


def parts_by_context(pair: LoadedPair, contexts: Sequence[int], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each context what `benchmarks.decoding` measures of a captured tree round on random keys and values: its
    milliseconds, by part, and the device's floor. Empty where rounds are not captured, as on a CPU."""
    runner = make_runner(pair.model, "auto", compiled=True)
    if not runner.capturable:
        return []
    from benchmarks.decoding import measure  # these two need Triton
    from longspec.inference.fused_runner import FusedRunner

    assert isinstance(runner, FusedRunner)
    ceilings, options = measure_ceilings(), Namespace(temperature=0.0, tree_shape=list(shape), gamma=4)
    family = pair.model.config.model_type
    return [asdict(measure(family, runner, [context], "tree", ceilings, options)) for context in contexts]


@torch.no_grad()
def attention_by_context(pair: LoadedPair, contexts: Sequence[int], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of a verification's attention, all layers: as one call of torch's scaled_dot_product_attention under
    a dense mask that is there already, and as prefix and tree that are merged, on the backend that decoding takes. On
    CUDA both are replayed from a graph."""
    model = pair.model
    hybrid = decoding_attention("auto", model.device, model.dtype, head_dim(model.config))
    return [
        {
            "context": context,
            "dense_ms": dense_ms(pair, context, 1 + sum(shape)),
            "hybrid_ms": None if hybrid.name == "sdpa" else hybrid_ms(pair, hybrid, context, 1 + sum(shape)),
            "backend": hybrid.name,
        }
        for context in contexts
    ]


def dense_ms(pair: LoadedPair, context: int, nodes: int) -> float:
    q, layers = random_layers(pair, context, nodes)
    mask = dense_mask(chain_mask(q), context, layers.shape[4], q.shape[1] // layers.shape[3], q.dtype)
    return device_ms(lambda: [dense_attention(q, keys, values, mask) for keys, values in layers])


def hybrid_ms(pair: LoadedPair, attention: DecodingAttention, context: int, nodes: int) -> float:
    q, layers = random_layers(pair, context, nodes)
    mask, lengths = chain_mask(q), torch.tensor([context], dtype=torch.int32, device=q.device)
    scale = q.shape[3] ** -0.5

    def verify() -> None:
        attend = attention.hybrid(lengths, mask)
        for keys, values in layers:
            attend(q, keys, values, scale)

    return device_ms(verify)


def random_layers(pair: LoadedPair, context: int, nodes: int) -> tuple[Tensor, Tensor]:
    """q [1, Hq, N, D] of N nodes, and keys and values of their own in every layer [layers, 2, 1, Hkv, S, D]: those of
    the context, then the nodes'."""
    config, place = pair.model.config, {"dtype": pair.model.dtype, "device": pair.model.device}
    size, slots = head_dim(config), -(-(context + nodes) // MASK_ALIGNMENT) * MASK_ALIGNMENT
    q = torch.randn(1, config.num_attention_heads, nodes, size, **place)
    return q, torch.randn(config.num_hidden_layers, 2, 1, config.num_key_value_heads, slots, size, **place)


def chain_mask(q: Tensor) -> Tensor:
    """Which nodes a node sees, bool [1, N, N]; which ones these are costs no time."""
    return torch.ones(1, q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


def dense_mask(tree_mask: Tensor, context: int, slots: int, group: int, dtype: torch.dtype) -> Tensor:
    """`tree_mask` and the context before it as what is added to the scores, [1, 1, group · N, S]."""
    visible = F.pad(F.pad(tree_mask, (context, 0), value=True), (0, slots - context - tree_mask.shape[2]), value=False)
    added = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))
    return added.repeat(1, group, 1)[:, None]


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[1, Hq, N, D]; the heads of a group are rows of their one KV head, so that its keys are read once."""
    rows = q.view(1, keys.shape[1], -1, q.shape[3])
    return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).view(q.shape)


def device_ms(work: Callable[[], object]) -> float:
    """The median of a few runs, on CUDA in a graph."""
    if torch.cuda.is_available():
        return captured_ms(work)
    times = []
    for _ in range(1 + RUNS):
        start = perf_counter()
        work()
        times.append(1e3 * (perf_counter() - start))
    return median(times[1:])
