"""The pool of engines: tokens as without it, nothing paid twice or left behind; and captured starts and prompts."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from calls import noted
from pairs import OPTIONS, make_pair, target_greedy
from torch import Tensor

from longspec import generate
from longspec.errors import UserError
from longspec.inference import engine_pool
from longspec.inference.cache import TargetCache
from longspec.inference.engine import capture, prefill
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.prefill import PromptReader
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import AUTO, METHODS, Drafting
from longspec.kernels.torch.attention import DecodingAttention
from longspec.models.glide import GlideMixin

SHAPE = (3, 4)
SETTINGS = {"tree_shape": SHAPE, "gamma": 3, "max_new_tokens": 12}
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3}
SAMPLINGS: list[dict[str, Any]] = [{}, *({"temperature": 1.0} | more for more in ({}, {"top_k": 9}, PENALTIES))]


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 61, (1, length), generator=torch.Generator().manual_seed(seed))


def tokens(model: GlideMixin, ids: Tensor, **settings: Any) -> list[list[int]]:
    return [new.tolist() for new in generate(model, ids.to(model.device), **(SETTINGS | settings)).new_tokens]


def without_pool(model: GlideMixin, ids: Tensor, **settings: Any) -> list[list[int]]:
    engine_pool.release(model)
    new = tokens(model, ids, **settings)
    engine_pool.release(model)
    return new


def idle(model: GlideMixin) -> list[Batch]:
    return engine_pool._idle.get(model, [])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Batch]]:
    """The engines that were built."""
    engines = noted(monkeypatch, Batch, "__init__", lambda engine, *_: engine)
    yield engines
    engines.clear()


@pytest.mark.parametrize("method", METHODS)
def test_a_second_call_builds_nothing_and_emits_the_same_tokens(
    tmp_path: Path, method: str, device: str, built: list[Batch]
) -> None:
    """Other prompts, seeds and limits; a stale prefix, window or history would show."""
    model = make_pair(tmp_path, options=OPTIONS["both"], initializer_range=0.1).to(device)
    for sampling in SAMPLINGS:
        calls: list[tuple[Tensor, dict[str, Any]]] = [
            (prompt(40, 1), {"seed": 1}),
            (prompt(3, 2), {"seed": 2, "max_new_tokens": 20}),
            (prompt(40, 1), {"seed": 3}),
            (prompt(40, 1), {"seed": 1}),
        ]
        settings = {"method": method, **sampling}
        expected = [without_pool(model, ids, **settings, **own) for ids, own in calls]
        built.clear()
        state = torch.random.get_rng_state()
        assert [tokens(model, ids, **settings, **own) for ids, own in calls] == expected
        assert len(built) == 1 and torch.equal(torch.random.get_rng_state(), state)
        assert (expected[0] == expected[3]) and (expected[0] != expected[2] or not sampling)


def test_weights_and_vocabularies_that_change_take_effect(tmp_path: Path, device: str, built: list[Batch]) -> None:
    """Weights in place and by new ones, and a draft's list of tokens; on a GPU in captured rounds."""
    model = make_pair(tmp_path).to(device)
    before = tokens(model, prompt(9))
    model.lm_head.weight.data.neg_()
    assert tokens(model, prompt(9)) == [target_greedy(model, prompt(9)[0], 12)] != before
    assert len(built) == 1
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach(), requires_grad=False)
    assert tokens(model, prompt(9)) == before
    for step in (2, 3):
        model.draft_model.set_vocabulary(torch.arange(0, 40, step))
        settings = {"temperature": 1.0, "seed": 1, "max_new_tokens": 40}
        assert tokens(model, prompt(9), **settings) == without_pool(model, prompt(9), **settings)


def test_a_faulty_call_leaves_no_nan_to_the_next_one(model: GlideMixin) -> None:
    """NaN in a value of the cache would spread to masked slots; the engine of a failed call is not kept."""
    expected = tokens(model, prompt(9), method="magicdec")
    weight = model.lm_head.weight.data
    kept = weight[3, 4].clone()
    weight[3, 4] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        tokens(model, prompt(9), method="magicdec")
    assert not idle(model)
    weight[3, 4] = kept
    assert tokens(model, prompt(9), method="magicdec") == expected


def test_an_engine_in_use_is_not_shared(tmp_path: Path, built: list[Batch]) -> None:
    """Two threads decode different prompts at the same time."""
    model, barrier = make_pair(tmp_path), Barrier(2)

    class Meeting:
        calls = 0

        def put(self, value: Tensor) -> None:
            self.calls += 1
            if self.calls == 3:  # both have played rounds
                barrier.wait(60)

        def end(self) -> None: ...

    def run(number: int) -> list[list[int]]:
        return tokens(model, prompt(20, number), streamer=Meeting())

    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(run, range(2))]
    assert results == [[target_greedy(model, prompt(20, number)[0], 12)] for number in range(2)]
    assert len(built) == 2 == len(idle(model))


@pytest.mark.parametrize("method", ["tree", "auto"])
def test_a_released_engine_is_freed_at_once_and_idle_ones_with_the_model(
    tmp_path: Path, method: str, built: list[Batch]
) -> None:
    """At once: without a garbage collection, because the memory is needed for another engine."""
    model = make_pair(tmp_path)
    gc.disable()
    try:
        for settings in ({"seed": 1, "temperature": 1.0}, {"batch_size": 1}):
            tokens(model, prompt(9), method=method, **settings)
            built[-1].reader._passes[8] = partial(built[-1].reader.chunk, 8)  # a captured pass keeps its call
            cache = weakref.ref(built.pop().cache)
            assert engine_pool.release(model) == 1 and cache() is None
    finally:
        gc.enable()
    tokens(model, prompt(9), method=method)
    cache, weight = weakref.ref(built.pop().cache), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert weight() is None and cache() is None


def test_idle_engines_are_bounded_in_bytes_and_freed_under_pressure(
    model: GlideMixin, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(model, prompt(9))
    (pooled,) = idle(model)
    size = pooled.pooled.bytes
    assert size >= pooled.cache.keys.nbytes + pooled.cache.values.nbytes
    # Room for two engines, in a quarter of the memory that is free without them.
    monkeypatch.setattr(engine_pool, "free_bytes", lambda device: int((2.5 / engine_pool.IDLE_SHARE - 3) * size))
    for shape in ((2, 2), (2, 3)):
        tokens(model, prompt(9), tree_shape=shape)
    assert len(idle(model)) == 2 and pooled not in idle(model)

    # Memory runs out once in a prefill: the idle engines are freed, and the call succeeds.
    read = PromptReader.read
    failures = [torch.OutOfMemoryError("out of memory")]

    def fails_once(*arguments: Any) -> Tensor:
        if failures:
            raise failures.pop()
        return read(*arguments)

    monkeypatch.setattr(PromptReader, "read", fails_once)
    assert tokens(model, prompt(9)) == [target_greedy(model, prompt(9)[0], 12)]
    assert len(idle(model)) == 1


def test_prompts_are_captured_later_where_rows_start_one_after_another(tmp_path: Path, built: list[Batch]) -> None:
    """After as many reads in each call, so that equal calls have equal results."""
    model, rows = make_pair(tmp_path), [prompt(9, seed)[0].tolist() for seed in range(3)]
    for settings, later in (({}, False), ({"batch_size": 2}, True)):
        generate(model, rows, **SETTINGS, **settings)
        reader = built.pop().reader
        assert reader.captures_later == later
    reader._reads[8] = 1
    generate(model, rows, **SETTINGS, batch_size=2)
    assert not built and not reader._reads


PROMPTS = {2: 70, 0: 9, 1: 1}
"""Number of prompt tokens by row. Row 2 starts twice, the second time with fewer tokens."""
CAPACITY, LARGEST = 512, 64
CHUNKS = {2: (64, 40, 3, 1, 64), 0: (1,), 1: (57, *[64] * 7)}
"""Lengths of the chunks by row. The last one of row 1 ends 7 slots before the row does: padding would go past it."""


@torch.no_grad()
@pytest.mark.parametrize(("method", "listed"), [("tree", False), ("lookup", False), (AUTO, True)])
def test_captured_starts_equal_eager_ones(
    method: str, listed: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows stay as they were."""
    if device == "cpu":  # the static tensors are the same without a graph
        monkeypatch.setattr(prefill, "capture_pass", lambda start, device: start)
    model = make_pair(tmp_path, dtype=torch.bfloat16, hidden_size=128).to(device)
    if listed:
        model.draft_model.set_vocabulary(torch.arange(1, model.config.vocab_size, 2, device=device))
    runner = make_runner(model, "auto", compiled=device == "cuda")
    batches = [Batch(runner, Drafting(method, (2, 3), 2), 3, 512) for _ in range(2)]
    captured, eager = (batch.starter for batch in batches)
    captured.capture()
    generator = torch.Generator().manual_seed(0)
    for row, count in [(2, 90), *PROMPTS.items()]:
        prompt = torch.randint(0, model.config.vocab_size, (1, count), generator=generator).to(device)
        for starter in (captured, eager):
            starter.start(slice(row, row + 1), prompt, [count])
    states = [batch.drafter.row_states() for batch in batches]
    assert states[0] and any(state.any() for state in states[0])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@torch.no_grad()
def test_captured_chunks_equal_eager_ones(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are captured at once, and those that are captured later. At the end, two rows are read together."""
    model = make_pair(tmp_path, dtype=torch.bfloat16, hidden_size=128, initializer_range=0.1).to(device)
    runner = make_runner(model, "auto", compiled=True)
    if device == "cpu":  # the static tensors are the same without a graph
        monkeypatch.setattr(prefill, "capture_pass", lambda chunk, device: chunk)
        attention, runner.capturable = DecodingAttention(), True

        def attend(rows: Tensor, end: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            visible = q.new_ones(1, q.shape[2], k.shape[2]).tril(end - q.shape[2]).bool()
            return attention.masked(q, k[rows], v[rows], visible, scale)

        runner.attention, attention.chunk = attention, lambda rows, ends: partial(attend, rows, int(ends))
    runner.prepare(CAPACITY)
    caches = [TargetCache(runner.config, 3, CAPACITY, runner.dtype, runner.device) for _ in range(3)]
    readers = [PromptReader(runner, cache, LARGEST, captures_later=cache is caches[2]) for cache in caches]
    readers[1].capture()
    assert not caches[1].keys.any(), "warming up stored tokens"
    generator = torch.Generator().manual_seed(0)

    def read(rows: slice, start: int, ends: list[int]) -> None:
        tokens = torch.randint(0, 61, (len(ends), max(ends) - start), generator=generator).to(device)
        expected, *hidden = [reader.read(rows, tokens, start, ends) for reader in readers]
        for reader, own in zip(readers[1:], hidden, strict=True):
            torch.testing.assert_close(own, expected, atol=5e-2, rtol=5e-2)
            assert reader.cache.lengths[rows].tolist() == ends

    for row, counts in CHUNKS.items():
        for start, end in pairwise([0, *accumulate(counts)]):
            read(slice(row, row + 1), start, [end])
    for cache in caches[1:]:
        stores = (cache.keys, cache.values), (caches[0].keys, caches[0].values)
        torch.testing.assert_close(*stores, atol=5e-2, rtol=5e-2)
        for row, counts in CHUNKS.items():
            assert not cache.keys[:, row, :, sum(counts) :].any(), "padding was stored"
    assert {*readers[2]._passes} == {8, 64}, "each was read three times or more"
    ends = [64, 7]
    read(slice(0, 2), 0, ends)
    for cache, (row, end) in product(caches[1:], enumerate(ends)):
        torch.testing.assert_close(cache.keys[:, row, :, :end], caches[0].keys[:, row, :, :end], atol=5e-2, rtol=5e-2)
    assert readers[2]._captured_sizes(ends, 0) == [64, 8]
    monkeypatch.setattr(prefill, "LAST_GROUP_START", -1)
    assert not readers[1]._captured_sizes(ends, 0) and readers[1]._captured_sizes(ends[:1], 0) == [64]
    readers[2].forget_reads()
    assert not readers[2]._captured_sizes(ends, 0)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_without_memory_is_tried_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that the first, uncaptured run left cached are freed in between."""
    errors = [torch.OutOfMemoryError("out of memory")] * failures

    def captured(call: object, device: torch.device) -> object:
        if errors:
            raise errors.pop()
        return call

    monkeypatch.setattr(capture, "CapturedPass", captured)
    if failures == 1:
        assert capture.capture_pass(print, torch.device("cpu")) is print
    else:
        with pytest.raises(torch.OutOfMemoryError):
            capture.capture_pass(print, torch.device("cpu"))
