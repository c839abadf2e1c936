"""The engine on the calling thread: its state after each round, what one step reads, and how requests end."""

import gc
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import noted
from oracles import Oracle, prefilled
from pairs import OPTIONS, make_pair, target_greedy
from serving import VOCAB, ids
from torch import Tensor

from longspec import generate
from longspec.errors import UserError
from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.time_cache import RoundTimes
from longspec.inference.answering import Conversation, Listener, answer_all
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.prefill import PREFILL_TOKENS, PromptReader
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Event, Finished, Request, Tokens
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.memory import chunk_bytes
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY, GREEDY_KIND
from longspec.inference.stats import GenerationStats, pool
from longspec.models.draft_layer import WINDOW
from longspec.models.glide import GlideMixin

VANILLA = Drafting("vanilla")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB)


def tokens_of_a_pass(rows: slice, chunks: list[list[int]], start: int) -> list[int]:
    """Number of tokens that `read_prompts` reads of each prompt."""
    return [len(chunk) for chunk in chunks]


@pytest.mark.parametrize(
    ("captured", "expected", "reused"),
    # 256 tokens at most, with padding. Fewer than 64 tokens of the prefix are not waited for.
    [(False, [[2, 9, 3, 64], [36, 37, 37]], 64), (True, [[2, 9, 3], [100], [1, 1]], 100)],
)
def test_short_prompts_are_read_in_one_pass_and_a_long_prefix_once(
    model: GlideMixin, captured: bool, expected: list[list[int]], reused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes take one row each, no long prompt is read in turns with short ones."""
    monkeypatch.setattr(PromptReader, "captures", captured)
    monkeypatch.setattr(PromptReader, "_captured_sizes", lambda *_: [])
    long = [1, 2, 3, 4, 5] * 20
    prompts = [[1, 2], [3] * 9, [4, 5, 6], long, [*long, 6], [*long, 2]]
    engine = RequestEngine(model, EngineSettings(VANILLA, 6, memory=2**27, prefill_chunk=256))
    passes = noted(monkeypatch, engine.batch, "read_prompts", tokens_of_a_pass)
    answers: list[list[Event]] = [[] for _ in prompts]
    tickets = [engine.add(Request(prompt, 5), take.append) for prompt, take in zip(prompts, answers, strict=True)]
    while engine.step():
        pass
    assert passes == expected
    for prompt, events in zip(prompts, answers, strict=True):
        assert ids(events) == target_greedy(model, torch.tensor(prompt), 5)
    assert [ticket.cached_prompt_tokens for ticket in tickets] == [0, 0, 0, 0, reused, reused]


def test_rows_that_are_refilled_together_are_read_together(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as a whole, and not after a short prefix. In blocks, no round waits for the clients of first tokens."""
    monkeypatch.setattr("longspec.inference.engine.intake.LEAST_SHARED", 256)  # as on a GPU
    settings = EngineSettings(VANILLA, 32, longest=110, kind=GREEDY_KIND, refill=16, prefill_chunk=735, in_blocks=True)
    engine = RequestEngine(model, settings)
    log = noted(monkeypatch, engine.batch, "read_prompts", tokens_of_a_pass)
    noted(monkeypatch, engine.batch, "play", lambda *key: 0, log)
    for number in range(90):
        engine.add(Request([1, 2, 3, 4, 5, 6, 0] * 10, 2 + number * 7 % 32), log.append)
    while engine.step():
        pass
    passes = [{*entry} for entry in log if isinstance(entry, list)]
    assert passes == [{70}] * len(passes) and len(passes) <= 12
    assert (list, Tokens) not in pairwise(map(type, log))


def test_rows_are_given_up_for_long_requests(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for two long rows, all requests get their tokens on as many rows."""
    rows: list[int] = []
    init = RequestEngine.__init__

    def small(self: RequestEngine, model: GlideMixin, settings: EngineSettings) -> None:
        memory = chunk_bytes(model.config, model.dtype, PREFILL_TOKENS) + 1_000_000
        init(self, model, replace(settings, memory=memory))
        rows.append(self.batch.max_rows)

    monkeypatch.setattr(RequestEngine, "__init__", small)
    requests = [Request([1 + number % 5] * (900 if number < 3 else 4), 6) for number in range(12)]
    found: list[list[int]] = [[] for _ in requests]
    stats = answer_all(model, VANILLA, requests, 8, Listener(lambda number, event: found[number].extend(event.ids)))
    assert found == [target_greedy(model, torch.tensor(request.prompt), 6) for request in requests]
    assert len(rows) == 1 and rows[0] < 8
    with pytest.raises(UserError, match=r"^prompt 1: "):  # it fits into no row
        answer_all(model, VANILLA, [requests[4], Request([1] * 4000, 6)], 8, Listener(print))
    assert stats.decoded_tokens == stats.rounds == 12 * 5


def test_each_answer_has_its_own_figures(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add up to those of all; a round's time is shared out once, and a capture is in no other time."""
    clock, read, captured = time.perf_counter, PromptReader.read, [0]

    def capture_and_read(reader: PromptReader, *part: Any) -> Tensor:
        reader.capture_s += 100
        captured[0] += 100
        return read(reader, *part)

    monkeypatch.setattr(PromptReader, "read", capture_and_read)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + captured[0])
    requests = [Request([1 + number % 5] * (3 + number), 4 + 2 * number) for number in range(5)]
    own: dict[int, GenerationStats] = {}
    whole = answer_all(model, Drafting("lookup"), requests, 2, Listener(lambda *_: None, own.__setitem__))
    assert [own[number].rounds for number in range(5)] == whole.row_rounds
    assert [own[number].decoded_tokens for number in range(5)] == [3 + 2 * number for number in range(5)]
    pooled = pool(list(own.values()))
    for name in ("rounds", "decoded_tokens", "accepted_by_depth", "build_s"):
        assert getattr(pooled, name) == getattr(whole, name), name
    assert 0 < pooled.decode_s <= whole.decode_s and all(0 < stats.ttft_s < 100 for stats in own.values())
    assert pooled.capture_s == captured[0] > 0 and whole.decode_s < 100
    assert sum(stats.build_s > 0 for stats in own.values()) == 1


@pytest.mark.parametrize(("method", "temperature"), [*product(("vanilla", "tree"), (0, 1)), ("auto", 0)])
def test_a_conversation_reads_new_tokens_only(
    tmp_path: Path, method: str, temperature: float, device: str, request: pytest.FixtureRequest
) -> None:
    """Its answers are those of `generate` with the whole prompt, and the text of a stopped one stays. The fourth prompt
    needs a larger row, is read as a whole, and frees the smaller row at once: without a garbage collection."""
    gc.disable()
    request.addfinalizer(gc.enable)
    model = make_pair(tmp_path, initializer_range=0.1).to(device)
    conversation, text = Conversation(model, Drafting(method, (3, 4)), "auto"), list[int]()
    read, caches = [], []
    for turn, count in enumerate((40, 5, 7, 600, 3)):
        text += torch.randint(1, 61, (count,), generator=torch.Generator().manual_seed(turn)).tolist()
        settings = {"method": method, "tree_shape": (3, 4), "temperature": temperature, "seed": turn}
        expected = generate(model, [text], max_new_tokens=12, **settings).new_tokens[0].tolist()
        answer: list[int] = []

        def take(number: int, event: Tokens, turn: int = turn, answer: list[int] = answer) -> None:
            answer += event.ids
            if turn == 1 and len(answer) > 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if turn == 1 else nullcontext():
            conversation.answer(Request([*text], 12, Sampling(temperature, seed=turn)), take)
        assert answer == expected[: len(answer)] and (turn == 1 or len(answer) == 12)
        assert conversation.engine is not None
        counts, whole = conversation.engine.worker.counts, len(text)
        read.append(counts.prompt_tokens - counts.cached_prompt_tokens)
        caches.append(weakref.ref(conversation.engine.batch.cache))
        text += answer
    # The newest token of an answer was read only if the last round went past it.
    assert all(new <= tokens <= new + 1 for new, tokens in zip((40, 5, 7, whole - 15, 3), read, strict=True)), read
    assert [cache() is None for cache in caches] == [True] * 3 + [False] * 2
    assert conversation.engine.longest >= 2 * (whole - 3)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("method", ["vanilla", "auto"])
def test_tokens_in_blocks_are_those_of_single_rounds(
    model: GlideMixin, ahead: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at stop tokens and limits, move together, and go to other requests; answers are longer than a block. A
    request that is cancelled has the tokens of all rounds before. With "auto", other plans come between."""
    stops = [frozenset({0, 5}), frozenset({6})]
    requests = [Request([1 + n % 5] * (3 + n), 5 + 41 * (n % 5), stop_ids=stops[n % 2]) for n in range(11)]
    cancelled = Request([2, 4, 1], 2000)
    monkeypatch.setattr("longspec.inference.engine.backlog.ROUNDS", 64)
    answers: list[list[list[Event]]] = []
    plans, counts = [], []
    ended = noted(monkeypatch, Controller, "end", lambda controller, row: controller.traces.get(row))
    for in_blocks in (False, True):
        ended.clear()
        turns = cycle((0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 3))
        monkeypatch.setattr(Controller, "choose", lambda self, t=turns: self.impose(self.plans[next(t)]))
        settings = EngineSettings(Drafting(method), 4, memory=2**27, kind=GREEDY_KIND, refill=2, in_blocks=in_blocks)
        engine = RequestEngine(model, settings)
        engine.batch.times.by_size[4] = RoundTimes((1, 2), {plan.name: (1.0, 1.0) for plan in engine.batch.plans}, 0.0)
        engine.batch.sizes, engine.worker.ahead = [1, 2, 4], ahead
        answers.append([[] for _ in range(1 + len(requests))])
        for request, events in zip([cancelled, *requests], answers[-1], strict=True):
            engine.add(request, events.append)
        tickets = list(engine.waiting)
        for _ in range(100):
            engine.step()
        engine.cancel(tickets[0])
        while engine.step():
            pass
        plans.append([ticket.plans for ticket in tickets])
        counts.append((engine.worker.counts.row_rounds, engine.worker.counts.decoded_tokens))
        texts = [
            request.prompt + ids(events) for request, events in zip([cancelled, *requests], answers[-1], strict=True)
        ]
        traces = [trace.tokens.tolist() for trace in ended if trace is not None]
        for traced in traces:  # it knows the texts up to the last rounds
            assert traced in [text[: len(traced)] for text in texts]
        assert len(traces) == (len(texts) if method == "auto" else 0)
    single, blocks = answers
    assert plans[0] == plans[1] and counts[0] == counts[1]
    assert [ids(events) for events in blocks] == [ids(events) for events in single]
    assert max(map(len, blocks)) < (12 if method == "vanilla" else 80) and max(map(len, single)) > 90
    assert ids(blocks[0])[:90] == target_greedy(model, torch.tensor(cancelled.prompt), 90)
    ends = [[events[-1].reason for events in one if isinstance(events[-1], Finished)] for one in answers]
    assert ends[0] == ends[1]


SHAPE = (2, 4, 3, 2)
DEPTH = len(SHAPE)
TOKENS = 61
# Accepted lengths by round and row: 0 … DEPTH all occur, in changing order, with a different one in each row.
PLAN = [[0, 4, 2], [4, 0, 1], [1, 3, 4], [3, 1, 0], [2, 2, 3], [4, 4, 4], [0, 0, 0]]


def full_forward_kv(model: GlideMixin, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's keys and values [L, Hkv, T, D] of tokens [T], from transformers' own forward and cache."""
    layers = model(tokens[None], use_cache=True).past_key_values.layers
    return torch.stack([layer.keys[0] for layer in layers]), torch.stack([layer.values[0] for layer in layers])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_state_after_every_accepted_length(tmp_path: Path, family: str, device: str) -> None:
    """After each round, compacted cache, newest hidden state, window, length and root are as after a fresh start."""
    model = make_pair(tmp_path, family, options=OPTIONS["both"]).to(device)
    lengths = [1, 40, WINDOW - 6]  # the last row's window wraps around on the way
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, TOKENS, (n,), generator=generator).to(device) for n in lengths]
    truth = [target_greedy(model, prompt, 1 + (DEPTH + 1) * (len(PLAN) + 1)) for prompt in prompts]
    # The true continuation, down to a planned depth, is on a random path of the real draft's tree.
    drafter = TreeDrafter(Runner(model), len(truth), SHAPE, GREEDY, "descend")
    oracle = Oracle(drafter, lengths, truth, PLAN, TOKENS)
    engine = prefilled(model, prompts, oracle, new_tokens=60)
    assert engine.root.tolist() == [row[0] for row in truth]
    at = [0, 0, 0]
    for planned in PLAN:
        tokens, counts, *_ = engine.round(torch.ones(3, dtype=torch.bool, device=device))
        assert counts.tolist() == [n + 1 for n in planned]
        for b, count in enumerate(counts.tolist()):
            assert tokens[b, :count].tolist() == truth[b][at[b] + 1 : at[b] + 1 + count]
            at[b] += count
            assert engine.root[b] == truth[b][at[b]] and engine.cache.lengths[b] == lengths[b] + at[b]
            check_row(model, engine, oracle, b, torch.cat([prompts[b], torch.tensor(truth[b][: at[b]], device=device)]))


def check_row(model: GlideMixin, engine: StaticBatch, oracle: Oracle, b: int, read: Tensor) -> None:
    """`read`: the tokens before the root. Target cache against a full forward, window against fresh projections."""
    length = len(read)
    newest = model.model(read[None]).last_hidden_state[0, -1]
    torch.testing.assert_close(engine.cache.newest_hidden[b, 0], newest, rtol=1e-4, atol=1e-4)
    for store, expected in zip((engine.cache.keys, engine.cache.values), full_forward_kv(model, read), strict=True):
        torch.testing.assert_close(store[:, b, :, :length], expected, rtol=1e-4, atol=1e-4)
    positions = torch.arange(max(0, length - WINDOW), length, device=read.device)
    embeddings, rope = model.embed(read[None, positions], positions[None])
    ring = oracle.drafter.draft.cache
    for store, expected in zip((ring.keys, ring.values), model.draft_model.keys_values(embeddings, rope), strict=True):
        torch.testing.assert_close(store[b][:, positions % WINDOW], expected[0], rtol=1e-5, atol=1e-5)
