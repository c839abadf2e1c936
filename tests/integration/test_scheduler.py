"""Continuous batching: every request gets the tokens that it would get alone, whatever runs next to it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import noted
from pairs import FAMILIES, make_pair
from serving import SMALL, VOCAB, Answer, alone, answers, drafted_pair, random_requests, serving
from torch import Tensor

from longspec.inference.drafting.proposal import WrappedDrafter
from longspec.inference.engine.requests import Request, Tree
from longspec.inference.engine.round_record import RoundResult
from longspec.inference.engine.rounds import Rounds
from longspec.inference.request import Sampling
from longspec.models.glide import GlideMixin

Models = Callable[..., GlideMixin]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def model(family: str, options: str) -> GlideMixin:
        return drafted_pair(tmp_path_factory.mktemp("pair"), family, options)

    return lambda family, options="published": model(family, options)


def check_scores(model: GlideMixin, request: Request, answer: Answer) -> None:
    """Of all tokens but the prompt's first, against one pass of the target."""
    tokens = torch.tensor([request.prompt + answer.ids], device=model.device)
    with torch.no_grad():
        log_p = model(tokens).logits[0, :-1].log_softmax(-1)
    own, best = log_p.gather(1, tokens[0, 1:, None])[:, 0], log_p.topk(request.alternatives)
    scores = [*answer.prompt_scores, *answer.events]
    alternatives = [pairs for part in scores for pairs in part.alternatives or []]
    assert [value for part in scores for value in part.logprobs or []] == pytest.approx(own.tolist(), abs=1e-4)
    assert [[token for token, _ in pairs] for pairs in alternatives] == best.indices.tolist()
    values = [value for pairs in alternatives for _, value in pairs]
    assert values == pytest.approx(best.values.flatten().tolist(), abs=1e-4)


@pytest.mark.parametrize("method", ["tree", "auto", "vanilla"])
def test_scores_are_those_of_the_target(models: Models, method: str) -> None:
    """Of the tokens of an answer and of its prompt, which is read in chunks, next to a request without scores."""
    model, prompt = models("llama"), [1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 1]
    scored = Request(prompt, 12, Sampling(1.0, seed=5), alternatives=3, scores_prompt=True)
    with serving(model, method=method, max_rows=2, prefill_chunk=4) as scheduler:
        answer, plain, again = answers(scheduler, [scored, Request(prompt, 12), scored])
    for found in (answer, again):
        check_scores(model, scored, found)
    assert len(answer.prompt_scores) == 3 and not plain.prompt_scores
    assert all(event.alternatives is None and event.logprobs is None for event in plain.events)


@pytest.mark.parametrize(
    ("family", "options", "settings", "ahead"),
    [
        ("llama", "published", {}, 0),
        ("qwen2", "both", {}, 1),
        ("llama", "published", {"tree_rule": "descend"}, 0),
        ("qwen2", "published", {"tree_nodes": 9, "lookup_branches": True}, 1),
        ("qwen2", "listed", {"tree_nodes": 6}, 0),
        ("qwen2", "published", {"method": "seq"}, 1),
        ("llama", "published", {"method": "lookup"}, 0),
        ("qwen2", "published", {"method": "magicdec"}, 1),
        ("llama", "published", {"method": "vanilla"}, 0),
        ("qwen2", "both", {"method": "auto"}, 1),
    ],
)
@pytest.mark.usefixtures("own_cache")
def test_requests_are_answered_as_alone(models: Models, family: str, options: str, settings: Any, ahead: int) -> None:
    model = models(family, options)
    requests = random_requests(10, VOCAB)
    with serving(model, ahead, max_rows=3, **settings) as scheduler:
        mixed = answers(scheduler, requests)
        snapshot = scheduler.snapshot()
    for request, answer in zip(requests, mixed, strict=True):
        if request.sampling.temperature == 0:
            assert answer.ids == alone(model, request)
    assert sum(len(answer.ids) for answer in mixed) == snapshot.new_tokens
    if settings.get("method") != "vanilla":
        assert snapshot.accepted_tokens > 3 and snapshot.decoded_tokens > snapshot.row_rounds
    with serving(model, max_rows=1, **settings) as scheduler:
        for request, answer in zip(requests, mixed, strict=True):
            if request.sampling.temperature > 0:
                assert answer.ids == answers(scheduler, [request])[0].ids


def test_events_of_an_answer(models: Models) -> None:
    with serving(models("llama"), max_rows=2) as scheduler:
        answer = answers(scheduler, [Request([3, 1, 4, 1, 5], 12, trace=True)])[0]
    first, *rounds = answer.events
    assert first.origins == ["target"] and first.tree is None
    emitted = list(first.ids)
    for event in rounds:
        assert isinstance(event.tree, Tree)
        assert event.tree.tokens[0] == emitted[-1]
        path = [0, *event.tree.accepted]
        assert [event.tree.parents[node] for node in path] == [-1, *path[:-1]]
        proposed = [token for token, origin in zip(event.ids, event.origins, strict=True) if origin == "draft"]
        assert [event.tree.tokens[node] for node in path[1:]][: len(proposed)] == proposed
        emitted += event.ids
    timings = answer.finished.timings
    assert timings.rounds == len(rounds) and timings.ttft_s > 0 and answer.finished.reason == "length"


@pytest.mark.parametrize(
    ("options", "temperature"), [("published", 0.0), ("kv_layers", 0.0), ("both", 1.0), ("listed", 1.0)]
)
def test_a_follow_up_reuses_its_row(models: Models, options: str, temperature: float) -> None:
    """Trees are compared too, as a wrong window, feature or layer of the draft changes nothing else."""
    model = models("qwen2", options)
    sampling = Sampling(temperature, seed=3)
    first = Request([5, 3, 2, 6] * 10, 20, sampling, trace=True)
    with serving(model, max_rows=2) as scheduler:
        opening, other = answers(scheduler, [first, Request([1, 2] * 15, 20, sampling)])
        second = replace(first, prompt=[*first.prompt, *opening.ids, 4, 4, 1])
        vanilla = answers(scheduler, [replace(second, speculate=False)])[0]  # leaves the draft's state behind
        reused = answers(scheduler, [second])[0]
        branched = answers(scheduler, [replace(first, max_new_tokens=5)])[0]
    with serving(model, max_rows=3) as scheduler:
        fresh = answers(scheduler, [second])[0]
    assert other.ticket.cached_prompt_tokens == 0
    assert vanilla.ticket.cached_prompt_tokens >= len(first.prompt) + len(opening.ids) - 1
    assert branched.ticket.cached_prompt_tokens == len(first.prompt) - 1 and branched.ids == opening.ids[:5]
    assert [event.tree for event in branched.events] == [event.tree for event in opening.events[: len(branched.events)]]
    assert reused.ids == fresh.ids
    assert [event.tree for event in reused.events] == [event.tree for event in fresh.events]


def test_running_rows_wait_for_one_chunk_at_most(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[int] = []
    with serving(models("llama"), max_rows=3) as scheduler:
        noted(monkeypatch, scheduler.batch, "read_prompts", lambda rows, chunks, start: sum(map(len, chunks)), log)
        noted(monkeypatch, scheduler.batch, "rounds", lambda *mode: 0, log)
        long = Request([1, 2, 3, 4, 5] * 20, 3)
        requests = [Request([6, 5], 40), long, replace(long, prompt=long.prompt[::-1]), Request([5], 1)]
        answers(scheduler, requests)
    first_round, last_chunk = log.index(0), len(log) - 1 - next(i for i, n in enumerate(log[::-1]) if n)
    between = [sum(chunks) for _, chunks in groupby(log[first_round:last_chunk], bool)]
    assert max(between) <= SMALL["prefill_chunk"] and len(between) > 20


def test_a_finished_row_goes_to_the_next_request(models: Models) -> None:
    """Six short answers and one long one on two rows: the short ones do not wait for the long one."""
    with serving(models("llama"), max_rows=2) as scheduler:
        long = Answer(scheduler, Request([1], 200, speculate=False))
        short = answers(scheduler, [Request([2, number], 4) for number in range(6)])
        assert long.end is None or long.end.timings.rounds > 24
        assert long.finished.timings.rounds == 199
        assert all(answer.finished.timings.rounds <= 3 for answer in short)
        assert scheduler.snapshot().rounds < 230


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.gpu
def test_captured_rounds_answer_as_alone(tmp_path: Path, family: str) -> None:
    """Rounds with scores, which are not captured, work on the same rows."""
    model: GlideMixin = make_pair(tmp_path, family, vocab_size=VOCAB).to("cuda")  # type: ignore[assignment]
    scored = Request([1, 2, 3] * 9, 12, alternatives=3, scores_prompt=True)
    requests = [*random_requests(24, VOCAB), scored]
    with serving(model, max_rows=5) as scheduler:
        mixed = answers(scheduler, requests)
        assert scheduler.batch.runner.capturable
        repeated = answers(scheduler, requests[::-1])[::-1]
    check_scores(model, scored, mixed[-1])
    for request, answer, other in zip(requests, mixed, repeated, strict=True):
        assert answer.ids == other.ids
        if request.sampling.temperature == 0:
            assert answer.ids == alone(model, request)


PROMPT = [1, 5, 1, 4, 2, 5, 1, 5, 1, 4, 2, 3]


def path_origins(drafter: Any, path: list[int]) -> list[str]:
    """Of the accepted tokens of row 0: from lookup as far as they follow one of the branches."""
    while isinstance(drafter, WrappedDrafter):
        drafter = drafter.drafter
    state = drafter.lookup.state
    exists = state.scores[0] > -torch.inf
    branches = [tokens[inside].tolist() for tokens, inside in zip(state.tokens[0], exists, strict=True)]
    depths = range(1, len(path) + 1)
    return ["lookup" if any(branch[:d] == path[:d] for branch in branches) else "draft" for d in depths]


def test_tokens_and_trees_have_the_origin_of_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamers get the origins of these events."""
    expected: list[list[str]] = []
    play = Rounds.round

    def watched(self: Rounds, active: Tensor) -> RoundResult:
        played = play(self, active)
        path = played.tokens[0, : int(played.counts[0]) - 1].tolist()
        expected.append([*path_origins(self.drafter, path), "target"])
        return played

    monkeypatch.setattr(Rounds, "round", watched)
    # A pair that loops, with a vocabulary so small that a random draft is often right.
    model = make_pair(tmp_path, "qwen2", vocab_size=VOCAB)
    with serving(model, max_rows=1, method="tree", lookup_branches=True, tree_nodes=9) as scheduler:
        expected.clear()
        (answer,) = answers(scheduler, [Request(PROMPT, 60, trace=True)])
    assert answer.events[0].origins == ["target"]
    for event, origins in zip(answer.events[1:], expected, strict=True):
        assert event.origins == origins[: len(event.ids)]
        assert event.tree is not None and event.tree.origins == origins[:-1]
    assert {origin for event in answer.events for origin in event.origins} == {"draft", "lookup", "target"}
