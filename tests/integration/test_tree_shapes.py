"""`tree_shape="auto"` takes the shape that emits most tokens a second, measures it once, and changes no token."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair, target_greedy

from longspec import generate
from longspec.errors import UserError
from longspec.inference import tree_shapes
from longspec.inference.engine import Engine
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.inference.shape_cache import cache_folder, draft_fingerprint
from longspec.inference.tree_shapes import CANDIDATES, choose_shape, measure_shapes
from longspec.longbench.command import parse_options
from longspec.models.glide import GlideMixin

LIMIT = 4096


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tree_shapes, "TOKENS", 4)
    monkeypatch.setattr(tree_shapes, "PREFIXES", 2)


@pytest.fixture
def rounds_by_shape(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], int]:
    """How many rounds were played with each tree."""
    played: dict[tuple[int, ...], int] = {}
    play = Engine.round

    def counted(engine: Engine, active: torch.Tensor) -> Any:
        shape = getattr(engine.drafter, "shape", ())
        played[shape] = played.get(shape, 0) + 1
        return play(engine, active)

    monkeypatch.setattr(Engine, "round", counted)
    return played


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(length))


class Clock:
    """Time that only passes in rounds, as long in each as its tree says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[tuple[int, ...], float]) -> None:
        self.now = 0.0
        play = Engine.round

        def timed(engine: Engine, active: torch.Tensor) -> Any:
            self.now += seconds[engine.drafter.shape]  # type: ignore[attr-defined]
            return play(engine, active)

        monkeypatch.setattr(Engine, "round", timed)

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("fastest", [0, 3, len(CANDIDATES) - 1])
def test_it_takes_the_most_tokens_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: int) -> None:
    """With a target that is its own draft's equal nowhere, the round that is 20 times as short wins."""
    model = make_pair(tmp_path / "pair")
    seconds = {shape: 1.0 if number == fastest else 20.0 for number, shape in enumerate(CANDIDATES)}
    clock = Clock(monkeypatch, seconds)
    shape = choose_shape(Runner(model), prompt_of(9), [9], Sampler(0.0, 0, 1.0), "reject", LIMIT, clock)
    assert shape == CANDIDATES[fastest]


def test_acceptance_counts_as_much_as_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounds of one length a shape is taken that surely accepts more than the default."""
    model = make_pair(tmp_path / "pair", initializer_range=0.02)  # such a target repeats itself, so drafts are accepted
    clock = Clock(monkeypatch, dict.fromkeys(CANDIDATES, 0.5))
    prompt, sampler = prompt_of(9), Sampler(0.0, 0, 1.0)
    measured = measure_shapes(Runner(model), prompt, [9], sampler, "reject", 20, clock)
    monkeypatch.setattr(tree_shapes, "TOKENS", 20)
    shape = choose_shape(Runner(model), prompt, [9], sampler, "reject", LIMIT, clock)
    default, *others = measured
    assert next(row for row in others if row.shape == shape).acceptance_length > default.acceptance_length
    assert all(row.round_s == [0.5, 0.5] for row in measured)


def test_each_place_continues_the_prompt_up_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds from a later place leave the target's and the draft's memory of an earlier one as a prefill leaves it."""
    model, prompt, tokens = make_pair(tmp_path / "pair"), prompt_of(24), 5
    emitted: dict[tuple[tuple[int, ...], int], list[int]] = {}
    play = Engine.round

    def recorded(engine: Engine, active: torch.Tensor) -> Any:
        context = int(engine.cache.lengths[0])
        place = next(place for place in (8, 16, 24) if context < place + 8)
        found, counts = play(engine, active)
        emitted.setdefault((engine.drafter.shape, place), []).extend(found[0, : counts[0]].tolist())  # type: ignore[attr-defined]
        return found, counts

    monkeypatch.setattr(Engine, "round", recorded)
    monkeypatch.setattr(tree_shapes, "_prefix_lengths", lambda lengths: [[24], [16], [8]])
    measured = measure_shapes(Runner(model), prompt, [24], Sampler(0.0, 0, 1.0), "reject", tokens, lambda: 1.0)
    for row in measured:
        assert row.tokens == [len(emitted[row.shape, place]) for place in (24, 16, 8)]
        for place in (8, 16):
            assert emitted[row.shape, place][:tokens] == target_greedy(model, prompt[0, : place + 1], tokens)
        assert emitted[row.shape, 24][:tokens] == target_greedy(model, prompt[0], tokens + 1)[1:]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generation_is_the_same_and_the_second_one_measures_nothing(
    tmp_path: Path, family: str, rounds_by_shape: dict[tuple[int, ...], int]
) -> None:
    model, prompt = make_pair(tmp_path / "pair", family), prompt_of(20)
    first = generate(model, prompt, tree_shape="auto", max_new_tokens=15)
    assert first.new_tokens[0].tolist() == target_greedy(model, prompt[0], 15)
    assert set(rounds_by_shape) == set(CANDIDATES)
    rounds_by_shape.clear()
    second = generate(model, prompt, tree_shape="auto", max_new_tokens=15)
    assert set(rounds_by_shape) == {first.stats.tree_shape} == {second.stats.tree_shape}
    assert sum(rounds_by_shape.values()) == second.stats.rounds


def test_sampling_draws_the_same_with_and_without_a_calibration(tmp_path: Path) -> None:
    """Calibration draws from a generator of its own: torch's global state does not move."""
    model, prompt = make_pair(tmp_path / "pair"), prompt_of(20)

    def tokens(shape: Any) -> list[int]:
        torch.manual_seed(3)
        out = generate(model, prompt, tree_shape=shape, max_new_tokens=15, temperature=1.0)
        return out.new_tokens[0].tolist()

    calibrated = tokens("auto")
    (file,) = cache_folder().glob("*.json")
    shape = json.loads(file.read_text())["shape"]
    assert calibrated == tokens("auto") == tokens(shape)


@pytest.mark.gpu
def test_captured_rounds_are_measured_where_decoding_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_by_shape: dict[tuple[int, ...], int]
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, prompt = make_pair(tmp_path / "pair").cuda(), prompt_of(20)  # type: ignore[call-arg]
    out = generate(model, prompt, tree_shape="auto", max_new_tokens=15)
    assert out.new_tokens[0].tolist() == target_greedy(model, prompt[0], 15)
    rounds = {shape: count for shape, count in rounds_by_shape.items() if shape != out.stats.tree_shape}
    assert set(rounds.values()) == {2}, "a warm-up and a capture for each; what is timed is the graph"


def test_ragged_rows_are_calibrated_together(tmp_path: Path) -> None:
    model = make_pair(tmp_path / "pair")
    ids, mask = prompt_of(20).repeat(2, 1), torch.ones(2, 20, dtype=torch.long)
    mask[1, 11:] = 0
    out = generate(model, ids, mask, tree_shape="auto", max_new_tokens=9)
    for row, length in enumerate((20, 11)):
        assert out.new_tokens[row].tolist() == target_greedy(model, ids[row, :length], 9)


def test_what_a_shape_depends_on_has_an_entry_of_its_own(tmp_path: Path) -> None:
    """Another context bucket, temperature 0 or not, another draft; not another length in the bucket."""
    model = make_pair(tmp_path / "pair")

    def entries(model: GlideMixin, length: int, **more: Any) -> int:
        generate(model, prompt_of(length), tree_shape="auto", max_new_tokens=3, **more)
        return len(list(cache_folder().glob("*.json")))

    assert entries(model, 33) == entries(model, 64) == 1
    assert entries(model, 65) == 2
    assert entries(model, 64, temperature=1.0, seed=0) == 3
    before = draft_fingerprint(model)
    with torch.no_grad():
        model.draft_model.mlp.down_proj.weight[0, 0] += 1e-6  # type: ignore[union-attr, index]
    assert draft_fingerprint(model) != before
    assert entries(model, 64) == 4


@pytest.mark.parametrize("content", ["", "[1]", '{"shape": [3, 3]}', '{"shape": 4}'])
def test_a_damaged_entry_is_measured_anew_with_one_line(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = make_pair(tmp_path / "pair"), prompt_of(20)
    generate(model, prompt, tree_shape="auto", max_new_tokens=3)
    (file,) = cache_folder().glob("*.json")
    file.write_text(content)
    with caplog.at_level(logging.WARNING):
        generate(model, prompt, tree_shape="auto", max_new_tokens=3)
    assert len(caplog.records) == 1 and str(file) in caplog.text
    assert tuple(json.loads(file.read_text())["shape"]) in CANDIDATES


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model, prompt = make_pair(tmp_path / "pair"), prompt_of(20)
    out = generate(model, prompt, tree_shape="auto", max_new_tokens=5)
    assert out.new_tokens[0].tolist() == target_greedy(model, prompt[0], 5)
    assert "is not kept" in caplog.text


def test_the_end_of_the_window_bounds_the_calibration(tmp_path: Path) -> None:
    model = make_pair(tmp_path / "pair", max_position_embeddings=24)
    out = generate(model, prompt_of(20), tree_shape="auto", max_new_tokens=4)
    assert out.new_tokens[0].tolist() == target_greedy(model, prompt_of(20)[0], 4)


def test_the_command_takes_the_word_and_nothing_beside_it(tmp_path: Path) -> None:
    line = ["--task", "lcc", "--data_path_prefix", "x", "--tree_shape"]
    assert parse_options([*line, "auto"]).tree_shape == "auto"
    assert parse_options([*line, "4", "8"]).tree_shape == [4, 8]
    with pytest.raises(UserError, match="tree_shape"):
        parse_options([*line, "wide"])
    model = make_pair(tmp_path / "pair")
    for wrong in ("wide", [4, "auto"]):
        with pytest.raises(UserError, match=r"tree_shape: .*give the nodes of each level"):
            generate(model, prompt_of(5), tree_shape=wrong)  # type: ignore[arg-type]
