"""The experiment's trainings, before any starts: launch lines are whole configurations, arms have their drafts."""

import signal
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from longspec.train.config import compose_config, typed
from longspec.train.config_schema import TrainConfig
from scripts.pipeline.files import LONG_TEXTS
from scripts.pipeline.machine import CommandFailed, run
from scripts.pipeline.stages import StageSettings, launch_overrides
from scripts.reproduce import training
from scripts.reproduce.corpus import DRAFT_ANSWERS, DRAFT_TEXTS, HELD_OUT_LONG
from scripts.reproduce.run import VARIANTS, Run
from scripts.reproduce.settings import PRESETS
from scripts.reproduce.training import ABLATIONS, scored, side_by_side, train_arms, train_pairs

pytestmark = pytest.mark.slow


def config_of(stage: StageSettings, folder: Path) -> TrainConfig:
    overrides = launch_overrides(folder, folder / "data.jsonl", folder, None, stage, folder, ranks=1)
    return typed(compose_config("conf/exp", stage.experiment, [f"{key}={value}" for key, value in overrides.items()]))


@pytest.mark.parametrize("preset", ["h200", "24gb", "cpu"])
def test_stages_are_trained_as_the_experiment_says(preset: str, tmp_path: Path) -> None:
    settings = PRESETS[preset]("qwen2", None)
    for variant in VARIANTS:
        stages = settings.stages if variant == VARIANTS[0] else settings.compared_stages
        configs = [config_of(replace(stage, variant=variant), tmp_path) for stage in stages]
        assert {config.loss for config in configs} == {"distill"}
        assert {config.variant.name for config in configs} == {variant}
        assert {config.deepspeed.zero_optimization["stage"] for config in configs} == {1}
        assert {config.resume for config in configs} == {"latest"}
        saves = [config.max_steps // config.save_steps for config in configs]  # that a stop loses little
        assert saves == [5] * 3 if variant == VARIANTS[0] else set(saves) <= {5, 6}
        assert 10 <= configs[1].max_steps // configs[1].evaluation.steps <= 12
        assert [config.data.pack for config in configs] == [True, False, False]
        assert [config.data.answer_only for config in configs] == [False, False, True]
        assert [config.data.max_length for config in configs][1:] == [settings.corpus.window] * 2
        assert all("Qwen2Glide" in config.model._target_ for config in configs)
    h200 = PRESETS["h200"]("llama", None)
    assert sum(stage.limit_s or 0 for stage in (*h200.stages, *h200.compared_stages)) <= 290  # one after the other


def test_stage_2_is_scored_where_there_are_long_documents(tmp_path: Path) -> None:
    run, stages = Run(tmp_path, "llama", "h200"), PRESETS["h200"]("llama", None).stages
    file = tmp_path / "corpus" / HELD_OUT_LONG
    file.parent.mkdir()
    for text, numbers in ((None, []), ("", []), ('{"text": "long"}\n', [2])):
        if text is not None:
            file.write_text(text)
        given = [(stage.number, scored(stage, run).overrides.get("evaluation.files")) for stage in stages]
        assert [number for number, files in given if files] == numbers
        assert all(files in (None, f"[{file}]") for _, files in given)


def test_arms_differ_in_what_their_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is the same, and those without a difference are one draft, which is as long trained as the others."""
    run, settings = Run(tmp_path, "llama", "h200"), PRESETS["h200"]("llama", None)
    trained: dict[str, Any] = {}

    def note(run: Run, steps: Any, place: str, stages: Any, data: Any) -> None:
        assert place not in trained
        trained[place] = ([config_of(stage, tmp_path) for stage in stages], data)

    def learn(folder: Path, run: Run, settings: Any) -> None:
        targets[run.target_place] = settings.limit_s

    targets: dict[str, float] = {}
    monkeypatch.setattr(training, "learn", learn)
    monkeypatch.setattr(training, "train_drafts", note)
    monkeypatch.setattr(training, "generate_texts", lambda *_: None)
    arms, failure = train_arms(run, training.Steps(tmp_path), list(ABLATIONS), settings)
    assert failure is None
    unchanged, twice = "ablations/unchanged", "ablations/target/twice"
    assert arms["anchor_offset"]["on"] == (run, run.draft(unchanged, 2))
    assert arms["labels"]["distill"] == (run, run.draft(unchanged, 1))
    assert arms["slicing"]["block"] == (run, run.draft("base", 3))
    assert arms["lags"]["1-5"] == arms["window"]["512"] == arms["target"]["once"] == (run, run.draft(unchanged, 3))
    assert arms["window"]["128"] == (run, run.draft("ablations/window/128", 3))
    assert arms["target"]["twice"].run.target == tmp_path / twice / "target"
    assert arms["target"]["twice"].draft == run.draft(twice, 3)
    assert targets == {f"{twice}/target": 2 * settings.target.limit_s}
    steps = {tuple(config.max_steps for config in configs) for configs, _ in trained.values()}
    assert {len(one) for one in steps} == {1, 2, 3} and {one[0] for one in steps} == {settings.compared_stages[0].steps}

    def figures(place: str) -> list[tuple[int, int, str, int]]:
        return [(c.variant.max_offset, c.variant.depth, c.loss, c.model.window) for c in trained[place][0]]

    main = (15_000, 5, "distill", 512)
    assert figures(unchanged) == figures(twice) == [main] * 3
    assert figures("ablations/anchor_offset/off") == [(0, *main[1:])] * 2
    assert figures("ablations/slicing/slicing") == [(0, *main[1:])] * 3
    assert figures("ablations/lags/1-4") == [(15_000, 4, "distill", 512)] * 3
    assert figures("ablations/labels/hard") == figures("ablations/labels/generated") == [(15_000, 5, "ce", 512)]
    assert figures("ablations/window/128") == [(15_000, 5, "distill", 128)] * 3
    assert figures("ablations/window/2048") == [(15_000, 5, "distill", 2048)] * 3
    assert trained["ablations/labels/generated"][1] == {1: tmp_path / "generated" / "texts.jsonl"}
    assert len(trained) == 10


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "write_corpus",
        "write_held_out_tasks",
        "write_tokens",
        "train_target",
        "cache_rows",
        "write_warm_start",
    ):
        monkeypatch.setattr(training, name, lambda *_: None)


def test_rows_are_tokenised_once_and_again_when_a_stages_data_are_cut_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None
) -> None:
    """No stage depends on them as such: what another one reads leaves those before it as they are."""
    tokenised: list[int] = []
    trained: list[int] = []
    monkeypatch.setattr(training, "cache_rows", lambda data, target, stage, cache: tokenised.append(stage.number))
    monkeypatch.setattr(training, "train_stage", lambda folder, *given: trained.append(given[3].number))
    run, settings = Run(tmp_path, "llama", "tiny"), PRESETS["tiny"]("llama", None)

    def changed(**last: Any) -> tuple[list[int], list[int]]:
        tokenised.clear()
        trained.clear()
        train_pairs(run, replace(settings, stages=(*settings.stages[:-1], replace(settings.stages[-1], **last))))
        return sorted(tokenised), sorted(trained)

    assert changed() == ([1, 2, 3], [1, 1, 2, 2, 3, 3])
    assert changed() == ([], [])
    assert changed(learning_rate=9.0) == ([], [3, 3])
    assert changed(learning_rate=9.0, max_length=64) == ([1, 2, 3], [3, 3])


def test_stages_read_what_the_target_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None) -> None:
    """And the rows that are tokenised before are those that they then ask for."""
    run, settings = Run(tmp_path, "llama", "tiny"), PRESETS["tiny"]("llama", None)
    given: list[tuple[str, object]] = []
    trained: list[tuple[str, object]] = []

    def note(found: list[tuple[str, object]], data: Path, stage: StageSettings) -> None:
        found.append((data.name, stage.overrides.get("evaluation.files")))

    def write(folder: Path, _: Any) -> None:
        (folder / HELD_OUT_LONG).write_text("{}")

    monkeypatch.setattr(training, "write_corpus", write)
    monkeypatch.setattr(training, "cache_rows", lambda data, target, stage, cache: note(given, data, stage))
    monkeypatch.setattr(training, "train_stage", lambda folder, *given: note(trained, given[0], given[3]))
    train_pairs(run, settings)
    long = f"[{tmp_path / 'corpus' / HELD_OUT_LONG}]"
    assert given == [(DRAFT_TEXTS, None), (LONG_TEXTS, long), (DRAFT_ANSWERS, None)]
    assert sorted(trained, key=str) == sorted(2 * given, key=str)


@pytest.mark.parametrize("failing", ["sinkpi-slicing", "base"])
def test_a_variant_that_fails_stops_no_other_and_only_the_evaluated_one_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None, failing: str
) -> None:
    """The other one's failure is told, and its own later stages are not begun."""
    trained: list[tuple[str, int]] = []

    def train(folder: Path, *given: Any) -> None:
        trained.append((given[3].variant, given[3].number))
        if given[3].variant == failing and given[3].number == 2:
            raise CommandFailed("no such luck")

    monkeypatch.setattr(training, "train_stage", train)
    run, settings = Run(tmp_path, "llama", "tiny"), PRESETS["tiny"]("llama", None)
    if failing == VARIANTS[0]:
        with pytest.raises(CommandFailed):
            train_pairs(run, settings)
    else:
        assert isinstance(train_pairs(run, settings)[1], CommandFailed)
    assert sorted(trained) == sorted((v, n) for v in VARIANTS for n in (1, 2, 3) if (v, n) != (failing, 3))


def test_an_arm_that_fails_is_missing_and_the_others_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(run: Run, steps: Any, place: str, stages: Any, data: Any) -> None:
        if place.endswith("128"):
            raise CommandFailed("no such luck")

    monkeypatch.setattr(training, "train_drafts", train)
    run = Run(tmp_path, "llama", "h200")
    arms, failure = train_arms(run, training.Steps(tmp_path), ["window", "lags"], PRESETS["h200"]("llama", None))
    assert isinstance(failure, CommandFailed)
    assert {name: list(found) for name, found in arms.items()} == {"window": ["512", "2048"], "lags": ["1-4", "1-5"]}


def test_sigterm_ends_the_commands_that_run_side_by_side_and_those_that_come_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two run, of which each begins another one when the first is ended; a third one's turn never comes."""
    monkeypatch.setattr(training, "gpus", lambda: 1)
    begun: list[int] = []

    def stop(*_: Any) -> None:
        raise SystemExit(143)

    def stubborn(number: int) -> None:
        begun.append(number)
        for _ in range(2):
            with suppress(CommandFailed):
                run(["sleep", "60"], tmp_path / "log", {})

    before, start = signal.signal(signal.SIGALRM, stop), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(SystemExit):
            side_by_side([partial(stubborn, number) for number in range(3)])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sorted(begun) == [0, 1] and time.monotonic() - start < 30
