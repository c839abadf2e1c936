"""Time of a long prefill compared with transformers, memory of generation on top of weights and KV cache, and times of
short passes over a prompt, captured and kernel by kernel.

`python -m benchmarks.prefill` prints one line per measurement and, last, one JSON line. Weights and prompts are random.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.ceilings import measure_ceilings, timed_ms
from benchmarks.shapes import SHAPES, random_pair
from benchmarks.tables import print_result
from longspec import generate
from longspec.errors import UserError, reports_user_errors
from longspec.inference.cache import TargetCache
from longspec.inference.engine.prefill import PromptReader
from longspec.inference.fused_runner import make_runner
from longspec.kernels import ATTENTIONS
from longspec.models.draft_layer import WINDOW, head_dim
from longspec.models.glide import GlideMixin

TREE_SHAPE = (4, 16, 16, 16, 16)
NEW_TOKENS = 64


@reports_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", choices=list(SHAPES))
    parser.add_argument("--prompt_lens", type=int, nargs="*", default=[131072], help="prompts to prefill")
    default_lens = [4096, 131072, 262144 - NEW_TOKENS]
    parser.add_argument("--generate_lens", type=int, nargs="*", default=default_lens, help="prompts to continue")
    parser.add_argument("--chunk_lens", type=int, nargs="*", default=[128, 512, 1024], help="tokens of short passes")
    parser.add_argument("--chunk_starts", type=int, nargs="+", default=[0, 30000], help="tokens before them")
    parser.add_argument("--attention", default="auto", choices=["auto", *ATTENTIONS], help="of short passes")
    parser.add_argument("--runs", type=int, default=3, help="timed prefills; the median is reported")
    options = parser.parse_args()
    ceilings, model = measure_ceilings(), random_pair(options.shape)
    weights = torch.cuda.memory_allocated()

    prefills, generations = [], []
    for length in options.prompt_lens:
        ids = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
        implementations = {"ours": partial(ours, model, ids), "transformers": partial(theirs, model, ids)}
        for name, prefill in implementations.items():
            prefills.append({"prompt": length, "by": name} | timed(prefill, weights, options.runs))
            print("prefill", json.dumps(prefills[-1]), flush=True)
    for length in options.generate_lens:
        generations.append(generation(model, length, weights))
        print("generate", json.dumps(generations[-1]), flush=True)
    chunks = chunk_times(model, options.attention, options.chunk_starts, options.chunk_lens)
    results = {"prefill": prefills, "generate": generations, "chunks": chunks}
    print_result("prefill", options, **results, **ceilings.describe())


def ours(model: GlideMixin, ids: Tensor) -> None:
    """What `generate` does for a single token."""
    generate(model, ids, tree_shape=TREE_SHAPE, max_new_tokens=1, allow_untrained_draft=True)


@torch.no_grad()
def theirs(model: GlideMixin, ids: Tensor) -> None:
    """One forward pass over the whole prompt with logits for its last token, as in transformers' `generate`."""
    model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)


def timed(prefill: Callable[[], None], weights: int, runs: int) -> dict[str, float]:
    """Median seconds of a prefill after one warm-up, and peak memory in addition to the weights."""
    prefill()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed_ms(prefill, runs, repeats=1) / 1e3
    peak = torch.cuda.max_memory_allocated() - weights
    torch.cuda.empty_cache()
    return {"seconds": seconds, "peak_gib": peak / 2**30}


def generation(model: GlideMixin, length: int, weights: int) -> dict[str, float]:
    """Figures of one call of `generate` with method `tree` and a prompt of `length` tokens."""
    config = model.config
    ids = torch.randint(0, config.vocab_size, (1, length), device="cuda")
    stats = generate(model, ids, tree_shape=TREE_SHAPE, max_new_tokens=NEW_TOKENS, eos_token_id=()).stats
    token_bytes = 2 * 2 * config.num_key_value_heads * head_dim(config)
    target_kv = config.num_hidden_layers * token_bytes * (length + NEW_TOKENS)
    return {
        "prompt": length,
        "peak_over_weights_and_kv_gib": (stats.peak_memory_bytes - weights - target_kv) / 2**30,
        "draft_kv_mib": token_bytes * (WINDOW + 1 + sum(TREE_SHAPE)) / 2**20,
        "ttft_s": stats.ttft_s,
        "round_ms": stats.decode_s / stats.rounds * 1e3,
    }


@torch.no_grad()
def chunk_times(model: GlideMixin, attention: str, starts: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of passes over one row, launches included. Raises UserError if no pass can be captured."""
    if not lengths:
        return []
    runner, capacity = make_runner(model, attention, compiled=True), max(starts) + max(lengths)
    runner.prepare(capacity)
    cache = TargetCache(runner.config, 1, capacity, runner.dtype, runner.device)
    readers = {name: PromptReader(runner, cache, max(lengths)) for name in ("captured_ms", "eager_ms")}
    readers["captured_ms"].capture()
    if not readers["captured_ms"].captures:
        raise UserError(f"--attention {runner.attention.name}: its passes cannot be captured; give no --chunk_lens")
    rows = []
    for start, length in product(starts, lengths):
        tokens = torch.randint(0, model.config.vocab_size, (1, length), device="cuda")
        row = {"attention": runner.attention.name, "start": start, "tokens": length}
        for name, reader in readers.items():
            row[name] = timed_ms(partial(reader.read, slice(0, 1), tokens, start, [start + length]), 10, repeats=3)
        rows.append(row)
        print("chunk", json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
