"""From nothing to trained pairs: the experiment's steps up to the stages, and those of the ablations' arms."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

from longspec.models.draft_layer import WINDOW
from scripts.pipeline.files import LONG_TEXTS, TEXTS
from scripts.pipeline.machine import end_children, gpus, threads
from scripts.pipeline.stages import StageSettings, cache_rows, draft_weights, train_stage
from scripts.pipeline.steps import Steps
from scripts.pipeline.warm_start import write_warm_start
from scripts.reproduce.corpus import (
    DRAFT_ANSWERS,
    DRAFT_TEXTS,
    HELD_OUT_LONG,
    TOKENIZER,
    write_corpus,
    write_held_out_tasks,
)
from scripts.reproduce.generated import write_generated
from scripts.reproduce.run import VARIANTS, Run, Trained
from scripts.reproduce.settings import Settings
from scripts.reproduce.target import TargetSettings, train_target
from scripts.reproduce.tokens import write_tokens

T = TypeVar("T")
DATA = (DRAFT_TEXTS, LONG_TEXTS, DRAFT_ANSWERS)
"""Of stage 1, 2, 3."""
UNCHANGED = "ablations/unchanged"
"""The evaluated variant's draft after as much training as an arm has."""
TOKENS = "tokens"
ROWS = "rows"
"""What the stages make of DATA: tokenised, the same for all drafts."""
DEVICE = Lock()
"""Held by the stage that trains on the GPU. Two at a time are in each other's way: a step of 16 rows, of some 30 ms of
kernels, then took 120 ms."""


@dataclass(frozen=True)
class Arm:
    """What one arm of an ablation trains otherwise. One that changes nothing is UNCHANGED, or the second variant's."""

    variant: str = "sinkpi-slicing"
    overrides: Mapping[str, object] = field(default_factory=dict)
    last: int = 3
    """The stage whose draft is compared."""
    generated: bool = False
    """Whether its texts are the target's own."""
    target_time: float = 1.0
    """Of its time, how often the target is trained for it; other than 1: another target."""

    def place(self, ablation: str, arm: str) -> str:
        """Its folder."""
        if self.overrides or self.generated or self.target_time != 1:
            return f"ablations/{ablation}/{arm}"
        return UNCHANGED if self.variant == VARIANTS[0] else self.variant

    def run(self, run: Run, place: str) -> Run:
        """The run with this arm's target."""
        return replace(run, target_place=f"{place}/target") if self.target_time != 1 else run


ABLATIONS: dict[str, dict[str, Arm]] = {
    # Without offsets stage 1 never sees far positions, so what differs is how soon stage 2 gets anywhere.
    "anchor_offset": {"on": Arm(last=2), "off": Arm(overrides={"variant.max_offset": 0}, last=2)},
    # Contiguous positions in both, as block attention has them.
    "slicing": {"slicing": Arm(overrides={"variant.max_offset": 0}), "block": Arm(variant="base")},
    "lags": {"1-4": Arm(overrides={"variant.depth": 4}), "1-5": Arm()},
    "labels": {
        "hard": Arm(overrides={"loss": "ce"}, last=1),
        "distill": Arm(last=1),
        "generated": Arm(overrides={"loss": "ce"}, last=1, generated=True),
    },
    "target": {"once": Arm(), "twice": Arm(target_time=2)},
    "window": {
        "128": Arm(overrides={"model.window": 128}),
        "512": Arm(),
        "2048": Arm(overrides={"model.window": 2048}),
    },
}


@dataclass(frozen=True)
class RowSettings:
    """What the stages' tokenised rows depend on, besides corpus and target."""

    stages: tuple[dict[str, object], ...]

    @classmethod
    def of(cls, stages: Sequence[StageSettings]) -> "RowSettings":
        return cls(tuple({"max_length": stage.max_length} | of_the_data(stage) for stage in stages))


@dataclass(frozen=True)
class WarmStart:
    window: int


def of_the_data(stage: StageSettings) -> dict[str, object]:
    return {key: value for key, value in stage.overrides.items() if key.startswith("data.")}


def train_pairs(run: Run, settings: Settings) -> tuple[Steps, BaseException | None]:
    """Everything up to the drafts of both variants, as far as it is not there yet; the steps up to the target.

    Also what kept the second variant from being trained, which the evaluation can do without. Raises CommandFailed.
    """
    corpus = run.root / "corpus"
    steps = Steps(run.root)
    steps.run("corpus", settings.corpus, lambda folder: write_corpus(folder, settings.corpus))

    def ask(folder: Path) -> None:
        write_held_out_tasks(folder, corpus, settings.corpus, settings.tasks)

    steps.branch().run("tasks", settings.tasks, ask)  # other prompts to evaluate on need no other target
    steps.run(TOKENS, settings.tokens, lambda folder: write_tokens(folder, corpus))

    steps.run(run.target_place, settings.target, lambda folder: learn(folder, run, settings.target))

    def tokenise(folder: Path) -> None:
        for stage in settings.stages:
            cache_rows(corpus / DATA[stage.number - 1], run.target, scored(on_this_machine(stage), run), folder)

    # Before several launches want the same; a launch that finds nothing there makes it itself.
    steps.branch().run(ROWS, RowSettings.of(settings.stages), tokenise)

    def train(variant: str, stages: Sequence[StageSettings]) -> None:
        train_drafts(run, steps.branch(), variant, [replace(stage, variant=variant) for stage in stages])

    lengths = settings.stages, settings.compared_stages
    main, other = side_by_side([partial(train, *both) for both in zip(VARIANTS, lengths, strict=True)])
    main.result()
    return steps, other.exception()


def learn(folder: Path, run: Run, settings: TargetSettings) -> None:
    train_target(folder, run.root / "corpus" / TOKENIZER, run.root / TOKENS, settings)


def side_by_side(works: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """All of them done, on a GPU two at a time: one trains while the other loads. One that fails stops no other."""
    with ThreadPoolExecutor(2 if gpus() else 1) as pool:
        futures = [pool.submit(work) for work in works]
        try:
            wait(futures)
        except BaseException:  # SIGTERM or Ctrl-C
            for future in futures:
                future.cancel()
            while not all(future.done() for future in futures):  # a thread may be about to start a command
                end_children()
                time.sleep(0.1)
            raise
    return futures


def train_drafts(
    run: Run, steps: Steps, place: str, stages: Sequence[StageSettings], data: Mapping[int, Path] | None = None
) -> None:
    """The stages one after the other in `place`/stage<n>, from a warm start.

    data: other files than DATA.
    """
    window = stages[0].overrides.get("model.window", WINDOW)
    assert isinstance(window, int)
    draft = steps.run(f"{place}/start", WarmStart(window), lambda folder: write_warm_start(folder, run.target, window))
    for stage in stages:
        file = (data or {}).get(stage.number, run.root / "corpus" / DATA[stage.number - 1])

        def train(folder: Path, stage: StageSettings = stage, draft: Path = draft, file: Path = file) -> None:
            turn = DEVICE if gpus() else None
            train_stage(folder, file, run.target, draft, scored(on_this_machine(stage), run), run.root / ROWS, turn)

        folder = steps.run(f"{place}/stage{stage.number}", stage, train, resumable=True)
        draft = draft_weights(folder)


def scored(stage: StageSettings, run: Run) -> StageSettings:
    """With the file of its evaluations, where it has any and there were documents long enough."""
    file = run.root / "corpus" / HELD_OUT_LONG
    if "evaluation.steps" not in stage.overrides or not file.is_file() or not file.stat().st_size:
        return stage
    return replace(stage, overrides={**stage.overrides, "evaluation.files": f"[{file}]"})


def on_this_machine(stage: StageSettings) -> StageSettings:
    """With what the launch line says otherwise on a GPU. It changes no result, so no step depends on it."""
    if not gpus():
        return stage
    more = {"data.num_proc": threads(), "data.num_workers": 2, "model.attn_implementation": "flash_attention_2"}
    return replace(stage, overrides=more | dict(stage.overrides))


def train_arms(
    run: Run, steps: Steps, names: Sequence[str], settings: Settings
) -> tuple[dict[str, dict[str, Trained]], BaseException | None]:
    """By ablation its arms, none of them trained twice; `steps`: up to the target.

    Also what kept an arm, which is not among them then, from being trained.
    """
    arms = {(name, arm): how for name in names for arm, how in ABLATIONS[name].items()}
    longest: dict[str, Arm] = {}
    for place, how in ((how.place(*named), how) for named, how in arms.items()):
        if place not in longest or longest[place].last < how.last:
            longest[place] = how
    begun = {place: begin_arm(how.run(run, place), steps, how, settings) for place, how in longest.items()}
    works = [
        partial(train_arm, how.run(run, place), *begun[place], place, how, settings) for place, how in longest.items()
    ]
    failures = {place: future.exception() for place, future in zip(longest, side_by_side(works), strict=True)}
    found: dict[str, dict[str, Trained]] = {name: {} for name in names}
    for (name, arm), how in arms.items():
        if not failures[place := how.place(name, arm)]:
            found[name][arm] = Trained(how.run(run, place), run.draft(place, how.last))
    return found, next(filter(None, failures.values()), None)


def begin_arm(run: Run, steps: Steps, how: Arm, settings: Settings) -> tuple[Steps, dict[int, Path]]:
    """A chain of steps for an arm, and what it reads instead of DATA, generated here where that is the target's own.

    An arm's own target is trained here, too, while no other arm's draft waits on the GPU.
    """
    branch = steps.branch()
    if how.target_time != 1:
        target = replace(settings.target, limit_s=how.target_time * settings.target.limit_s)
        branch.run(run.target_place, target, lambda folder: learn(folder, run, target))
    if not how.generated:
        return branch, {}
    folder = branch.run("generated", settings.generation, lambda folder: generate_texts(folder, run, settings))
    return branch, {1: folder / TEXTS}


def train_arm(run: Run, steps: Steps, data: Mapping[int, Path], place: str, how: Arm, settings: Settings) -> None:
    stages = [
        replace(stage, variant=how.variant, overrides={**stage.overrides, **how.overrides})
        for stage in settings.compared_stages[: how.last]
    ]
    train_drafts(run, steps, place, stages, data)


def generate_texts(folder: Path, run: Run, settings: Settings) -> None:
    write_generated(folder, run.root / "corpus", run.target, settings.generation)
