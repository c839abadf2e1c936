"""Verification attention of one layer, compared with other implementations and with the limits of the device.

`python -m benchmarks.attention` prints a table in microseconds, then one JSON line. The setting is batch 1, bf16,
head_dim 128 and a tree of 69 nodes after the prefix. Each time is the median of several CUDA-graph replays over inputs
that exceed the L2 cache.

`floor` is the larger of two times: KV bytes over the read bandwidth, and floating-point operations over the rate of an
8192³ matrix product. Bandwidth and rate are measured in the same run.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from tqdm import tqdm

from benchmarks.ceilings import Ceilings, capture, measure_ceilings, timed_ms
from benchmarks.published_attention import published_attention
from benchmarks.tables import print_result, table
from longspec.errors import reports_user_errors
from longspec.kernels.choice import choose_backend
from longspec.kernels.torch.attention import DecodingAttention

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
LONGEST_DENSE = 40_000
"""Largest number of keys at which the baselines with a dense mask run."""
ROWS: list[tuple[str, int, int, int]] = [
    *(("Llama-3-8B", 32, 8, slots) for slots in (4096, 32768, 131072, 262144)),
    *(("QwQ-32B", 40, 8, slots) for slots in (4096, 32768, 131072)),
    *(("Vicuna-7B", 32, 32, slots) for slots in (4096, 32768, 131072)),
]
"""Model, query heads, KV heads, prefix length in tokens."""

Call = Callable[[], object]


class Inputs(NamedTuple):
    """q [1, H, N, D]; k, v [1, K, S, D] with S = prefix + N; lengths int32 [1]; tree_mask bool [1, N, N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    tree_mask: Tensor


TIMES = ("floor", "flash", "flash_one_token", "published", "sdpa", "triton", "auto")
"""Microseconds per call; None if it did not run. flash: FlashAttention-3 over prefix and nodes without the tree mask, a
reference and no correct verification; with one query token it is the attention of a vanilla decoding step."""
COLUMNS = {
    **{"model": "", "prefix": ""},
    **dict.fromkeys(TIMES, ".1f"),
    **{"triton_over_flash": ".2f", "auto_over_flash": ".2f"},
}


@reports_user_errors
def main() -> None:
    options = parse_options()
    ceilings = measure_ceilings()
    print(ceilings)
    rows = [measure(shape, ceilings, options) for shape in tqdm(ROWS)]
    print(table(rows, COLUMNS))
    print_result("attention", options, unit="us", rows=rows, triton=triton.__version__, **ceilings.describe())


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=69, help="tree nodes, the root included")
    add("--runs", type=int, default=9, help="timed replays; the median is reported")
    return parser.parse_args()


def measure(shape: tuple[str, int, int, int], ceilings: Ceilings, options: argparse.Namespace) -> dict[str, Any]:
    """TIMES of one of ROWS."""
    model, heads, kv_heads, prefix = shape
    inputs = make_inputs(heads, kv_heads, prefix, options.nodes)
    cuda = torch.device("cuda")
    backends = {name: choose_backend(name, cuda, torch.bfloat16, HEAD_DIM).attention for name in ("triton", "auto")}

    calls: dict[str, list[Call]] = {
        name: [partial(hybrid, backend, x) for x in inputs] for name, backend in backends.items()
    }
    if importlib.util.find_spec("fa3_fwd_interface"):
        calls["flash"] = [partial(flash, x, options.nodes) for x in inputs]
        calls["flash_one_token"] = [partial(flash, x, 1) for x in inputs]
        calls["published"] = [partial(published_attention, *x, SCALE) for x in inputs]
    keys = prefix + options.nodes
    if keys <= LONGEST_DENSE:
        calls["sdpa"] = [partial(sdpa, inputs[0], hybrid_mask(inputs[0]))]

    kv_bytes = 2 * kv_heads * keys * HEAD_DIM * inputs[0].k.element_size()
    operations = 4 * heads * options.nodes * keys * HEAD_DIM
    floor = 1e3 * ceilings.floor_ms(kv_bytes, operations)
    times: dict[str, Any] = dict.fromkeys(TIMES) | {"floor": floor} | time_calls(calls, options.runs)
    for name in backends:
        times[f"{name}_over_flash"] = times["flash"] and times[name] / times["flash"]
    return {"model": model, "heads": heads, "kv_heads": kv_heads, "prefix": prefix} | times


def make_inputs(heads: int, kv_heads: int, prefix: int, nodes: int) -> list[Inputs]:
    """Independent inputs whose keys and values together are at least four times the size of the L2 cache."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    slots = prefix + nodes
    copies = -(-4 * torch.cuda.get_device_properties("cuda").L2_cache_size // (4 * kv_heads * slots * HEAD_DIM))
    q = random(1, nodes, heads, HEAD_DIM).transpose(1, 2)
    lengths = torch.tensor([prefix], dtype=torch.int32, device="cuda")
    # A chain is the tree with the most visible nodes.
    tree_mask = torch.ones(1, nodes, nodes, dtype=torch.bool, device="cuda").tril()
    shape = (1, kv_heads, slots, HEAD_DIM)
    return [Inputs(q, random(*shape), random(*shape), lengths, tree_mask) for _ in range(copies)]


def hybrid(backend: DecodingAttention, x: Inputs) -> Tensor:
    return backend.hybrid(x.lengths, x.tree_mask)(x.q, x.k, x.v, SCALE)


def flash(x: Inputs, nodes: int) -> object:
    import fa3_fwd_interface

    q, k, v = (tensor.transpose(1, 2) for tensor in (x.q[:, :, :nodes], x.k, x.v))
    return fa3_fwd_interface.flash_attn_with_kvcache(q, k, v, cache_seqlens=x.lengths, softmax_scale=SCALE)


def hybrid_mask(x: Inputs) -> Tensor:
    """bool [1, 1, N, S]: every node sees the whole prefix, followed by the tree mask."""
    return F.pad(x.tree_mask, (x.k.shape[2] - x.q.shape[2], 0), value=True)[:, None]


def sdpa(x: Inputs, mask: Tensor) -> object:
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=mask, scale=SCALE, enable_gqa=True)


def time_calls(calls: dict[str, list[Call]], runs: int) -> dict[str, float]:
    """Median microseconds per call of each implementation. They run in turn, so that clock drift affects all alike."""
    repeated = {name: one_kind * -(-8 // len(one_kind)) for name, one_kind in calls.items()}
    graphs = {name: capture(partial(run_all, one_kind)) for name, one_kind in repeated.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(runs):
        for name, graph in graphs.items():
            times[name].append(timed_ms(graph.replay, runs=1, repeats=1) * 1e3 / len(repeated[name]))
    return {name: median(measured) for name, measured in times.items()}


def run_all(calls: list[Call]) -> None:
    for call in calls:
        call()


if __name__ == "__main__":
    main()
