"""Where the time of a tree round goes, by context, and what hybrid attention saves of it."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from longspec.inference.runner import make_runner
from longspec.kernels.attention import DecodingAttention, decoding_attention
from longspec.models.draft_layer import head_dim
from scripts.reproduce.pair import LoadedPair

RUNS = 5


def parts_by_context(pair: LoadedPair, contexts: Sequence[int], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each context what `benchmarks.decoding` measures of a captured tree round on random keys and values: its
    milliseconds, by part, and the device's floor. Empty where rounds are not captured, as on a CPU."""
    runner = make_runner(pair.model, "auto", compiled=True)
    if not runner.capturable:
        return []
    from benchmarks.ceilings import measure_ceilings  # these need Triton
    from benchmarks.decoding import measure
    from longspec.inference.fused_runner import FusedRunner

    assert isinstance(runner, FusedRunner)
    ceilings, options = measure_ceilings(), Namespace(temperature=0.0, tree_shape=list(shape), gamma=4)
    family = pair.model.config.model_type
    return [asdict(measure(family, runner, [context], "tree", ceilings, options)) for context in contexts]


@torch.no_grad()
def attention_by_context(pair: LoadedPair, contexts: Sequence[int], shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of a verification's attention, all layers, launched kernel by kernel: as one call under a dense mask
    (torch's scaled_dot_product_attention), and as prefix and tree that are merged, on the backend that decoding takes.
    """
    model = pair.model
    place = model.device, model.dtype
    hybrid = decoding_attention("auto", *place, head_dim(model.config))
    dense = decoding_attention("sdpa", *place, head_dim(model.config))
    return [
        {
            "context": context,
            "dense_ms": attention_ms(pair, dense, context, 1 + sum(shape)),
            "hybrid_ms": None if hybrid.name == dense.name else attention_ms(pair, hybrid, context, 1 + sum(shape)),
            "backend": hybrid.name,
        }
        for context in contexts
    ]


def attention_ms(pair: LoadedPair, attention: DecodingAttention, context: int, nodes: int) -> float:
    """Of a tree of so many nodes behind `context` tokens, over caches of their own in every layer."""
    config, device = pair.model.config, pair.model.device
    size, slots = head_dim(config), context + nodes
    q = torch.randn(1, config.num_attention_heads, nodes, size, dtype=pair.model.dtype, device=device)
    store = torch.randn(
        config.num_hidden_layers, 2, 1, config.num_key_value_heads, slots, size, dtype=q.dtype, device=device
    )
    lengths = torch.tensor([context], dtype=torch.int32, device=device)
    mask = torch.ones(1, nodes, nodes, dtype=torch.bool, device=device).tril()

    def all_layers() -> None:
        for keys, values in store:
            attention.hybrid(q, keys, values, lengths, mask, size**-0.5)

    return timed_ms(all_layers)


def timed_ms(work: Callable[[], None]) -> float:
    """The median of a few runs behind one that is not timed, on the device or the CPU."""
    times = []
    for _ in range(1 + RUNS):
        start = perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e3 * (perf_counter() - start))
    return median(times[1:])
