"""transformers' own `generate` on the same target: what LongSpec is compared with from outside.

transformers reports no times, so a streamer takes them: it gets a step's tokens on the host as soon as they are there,
and what comes behind the first ones is decoding. The loop waits for the device at every step anyway, to see whether it
is finished, as our own decoding does.

Of its assisted modes two work without a second model: prompt lookup, and early exit, in which the target's first layers
draft (for targets that were trained for it, which this one was not: a low figure says nothing against the method). A
smaller assistant, universal assisted decoding included, would have to be trained first.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from longspec.errors import first_line
from scripts.reproduce.pair import Prompt, sample_line

DYNAMIC, LOOKUP, EARLY_EXIT, STATIC = (f"transformers-{mode}" for mode in ("dynamic", "lookup", "early-exit", "static"))
BASELINES = (DYNAMIC, LOOKUP, EARLY_EXIT, STATIC)
"""The compiled one comes last: it is the one that may fail in a way that others notice."""
UNASSISTED = (DYNAMIC, STATIC)
LOOKUP_TOKENS = 10
"""What prompt lookup proposes at most: transformers' default, for its own and for ours."""
ROOM = 256
"""Positions of a static cache beyond its context."""
CALL_LIMIT_S = 150
"""For one call; compilation, which is part of the first, included."""


class BaselineFailed(Exception):
    """Why transformers' `generate` could not do it here."""


class ClockedStreamer:
    """When tokens came, and how many."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Transformers:
    """The target through `AutoModelForCausalLM`, loaded when it is first asked."""

    def __init__(self, target: Path, like: PreTrainedModel) -> None:
        """like: a model on the device and of the dtype to use."""
        self.target = target
        self.device, self.dtype = like.device, like.dtype
        self.model: Any = None
        self.static_caches: dict[int, StaticCache] = {}

    def sample(self, mode: str, prompt: Prompt, new_tokens: int, warm_up: bool = False) -> dict[str, Any]:
        """A prompt's greedy continuation, in the form of the evaluation's samples; BaselineFailed with the reason."""
        try:
            with time_limit(CALL_LIMIT_S):
                return self._sample(mode, prompt, new_tokens, warm_up)
        except Exception as error:  # whatever another library raises is what is to be reported
            raise BaselineFailed(f"{type(error).__name__}: {first_line(error)}") from error

    def _sample(self, mode: str, prompt: Prompt, new_tokens: int, warm_up: bool) -> dict[str, Any]:
        options = self._options(mode, prompt.context)
        if warm_up:
            options["min_new_tokens"] = new_tokens
        streamer, ids = ClockedStreamer(), prompt.token_ids
        start = time.perf_counter()
        sequence = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=streamer,
            **options,
        )
        tokens = sequence[0, ids.shape[1] :].tolist()
        # The first thing that a streamer gets is the prompt, the second what prefill gave.
        first, last = streamer.times[1], streamer.times[-1]
        return sample_line(self.model, prompt, tokens, sum(streamer.counts[2:]), last - first, first - start)

    def _options(self, mode: str, context: int) -> dict[str, Any]:
        if self.model is None:
            model: Any = AutoModelForCausalLM.from_pretrained(self.target, dtype=self.dtype, attn_implementation="sdpa")
            self.model = model.to(self.device).eval()
        if mode == LOOKUP:
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if mode == EARLY_EXIT:
            return {"assistant_early_exit": max(1, self.model.config.num_hidden_layers // 4)}
        return {"past_key_values": self._static_cache(context)} if mode == STATIC else {}

    def _static_cache(self, context: int) -> StaticCache:
        """One for all prompts of a context: on a GPU transformers compiles its steps for a cache's size."""
        if context not in self.static_caches:
            torch._dynamo.reset()  # the second size would be compiled for any size, which is slower
            self.static_caches = {context: StaticCache(self.model.config, max_cache_len=context + ROOM)}
        cache = self.static_caches[context]
        cache.reset()
        return cache


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread if the body takes longer, compilation included."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
