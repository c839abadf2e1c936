"""Baselines: the target run by transformers, with a compiled static cache and with a dynamic cache."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, StaticCache

from benchmarks.ceilings import timed_ms
from longspec.models.draft_layer import head_dim
from longspec.models.glide import GlideMixin

WARM_UP_TOKENS, TIMED_TOKENS = 16, 48
"""New tokens of the short generation, and the additional ones of the long generation."""
REPEATS = 3
"""Measurements of each generation; the fastest counts."""
PEERS = ("static", "dynamic")


def peer_ms(peer: str, model: GlideMixin, context: int) -> float | None:
    """Milliseconds per token of one of PEERS at batch 1; None if memory does not suffice."""
    try:
        return {"static": static_ms, "dynamic": dynamic_ms}[peer](model, context)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


@torch.no_grad()
def static_ms(model: GlideMixin, context: int) -> float:
    """Milliseconds per token of transformers' `generate` with a static cache, which it compiles on a GPU.

    The difference of a long and a short generation, so prefill and the start of `generate` do not count. Each is
    the fastest of several: a short generation that waits for a busy machine would make the tokens look faster.
    """
    with plain_target(model) as target:
        cache = StaticCache(config=target.config, max_cache_len=context + 1 + WARM_UP_TOKENS + TIMED_TOKENS)
        fill(cache, model, context)

        # The first generations compile the forward pass and record its CUDA graph.
        for _ in range(3):
            generate_seconds(target, cache, context, WARM_UP_TOKENS)
        lengths = [WARM_UP_TOKENS, WARM_UP_TOKENS + TIMED_TOKENS]
        seconds = [[generate_seconds(target, cache, context, length) for length in lengths] for _ in range(REPEATS)]
    torch.compiler.reset()
    short, long = map(min, zip(*seconds, strict=True))
    return (long - short) / TIMED_TOKENS * 1e3


@torch.no_grad()
def dynamic_ms(model: GlideMixin, context: int) -> float:
    """Milliseconds per forward pass with a dynamic cache and without a CUDA graph. Launches bound it."""
    cache = DynamicCache()
    fill(cache, model, context)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    return timed_ms(lambda: model(token, past_key_values=cache, use_cache=True), runs=5, repeats=2)


def fill(cache: Cache, model: GlideMixin, context: int) -> None:
    """Random keys and values of `context` tokens in every layer."""
    config = model.config
    shape = (1, config.num_key_value_heads, context, head_dim(config))
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, *shape, dtype=model.dtype, device=model.device)
        cache.update(keys, values, layer)


@contextmanager
def plain_target(model: GlideMixin) -> Iterator[Any]:
    """The target as transformers' own causal LM on the same weights, with torch's attention."""
    backbone: Any = model.model
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        target: Any = type(model).target_class(config)
    target.model = backbone
    target.lm_head = model.lm_head
    target.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    attention = backbone.config._attn_implementation
    target.config._attn_implementation = backbone.config._attn_implementation = "sdpa"
    try:
        yield target.eval()
    finally:
        backbone.config._attn_implementation = attention


def generate_seconds(target: Any, cache: StaticCache, context: int, new_tokens: int) -> float:
    """Seconds to generate after `context` cached tokens and one that is not cached."""
    layers: Any = cache.layers
    for layer in layers:
        layer.cumulative_length.fill_(context)
    prompt = torch.zeros(1, context + 1, dtype=torch.long, device=target.device)
    start = perf_counter()
    output = target.generate(prompt, past_key_values=cache, max_new_tokens=new_tokens, eos_token_id=None)
    output.tolist()  # waits for the device
    seconds = perf_counter() - start
    assert output.shape[1] == context + 1 + new_tokens
    return seconds
