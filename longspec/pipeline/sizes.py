"""The settings of `longspec draft` for a target, a machine and a number of hours: recipe.yaml, scaled."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.pipeline.estimates import TIGHT, Machine, Target, estimate
from longspec.pipeline.settings import (
    FORCED,
    OWN,
    AnswerSettings,
    ChatSettings,
    MethodSettings,
    Settings,
    StageSettings,
    TaskSettings,
    TrainingSettings,
    load_settings,
)
from longspec.train.recipe import RATES, has_muon

RECIPE = Path(__file__).with_name("recipe.yaml")
MOST_STEPS = 16_000
"""Largest number of steps of a stage."""
FACTORS = [2 ** (exponent / 8) for exponent in range(16, -57, -1)]
"""Scales of the recipe that are tried, the largest first."""
LATER_RATES = (1.0, 0.25, 0.075)
"""Learning rates of the stages, relative to the first."""
ROW, FIRST_ROWS, LONG_STEP = 1024, 16, 65_536
"""Tokens of a row and rows of a step in stage 1, and tokens of a step in the later stages."""
UNITS = 2**24 / 2**30 / 80
"""Tokens of a micro-batch times hidden units, per byte of the GPU's memory."""
LONG_UNITS = 2**27 / 2**30 / 80
"""The same for a single long row and the memory that the weights leave."""
MARGIN = 556
"""Tokens of a long row that a prompt leaves to its answer."""
MOST_OWN = 20_000


def chosen_settings(
    target: Target,
    machine: Machine,
    hours: float,
    contexts: int,
    text: Sequence[str] = (),
    own: int = 0,
    draft: str | None = None,
) -> Settings:
    """The settings that take about `hours` on a machine, or the smallest ones.

    contexts: longest context of training and evaluation, in tokens. own: number of the user's prompts in `text`. draft:
    a draft to evaluate; None to train one. Raises UserError for a target that is too large for the machine, or that has
    fewer than ROW positions.
    """
    if target.positions < ROW:
        problem = f"{target.positions} positions, fewer than the {ROW} tokens of a row of stage 1"
        raise UserError(f"{target.name}: {problem}; give settings of your own with --config")
    base = _for_target(target, machine, contexts, text, own)
    base.hours, base.contexts = hours, min(contexts, target.positions)
    base = evaluation_of(draft, base) if draft else base

    def seconds_saved(factor: float) -> float:
        return -estimate(_scaled(base, factor), target, machine).total

    first = bisect_left(FACTORS, -3600 * hours, key=seconds_saved)
    return _scaled(base, FACTORS[min(first, len(FACTORS) - 1)])


def evaluation_of(draft: str, settings: Settings) -> Settings:
    """The settings without text for training and without training: they evaluate a draft that exists."""
    return replace(
        settings,
        chat=replace(settings.chat, train=0, validation=0),
        code=replace(settings.code, train_files=0),
        prompts=replace(settings.prompts, train={}, validation={}),
        answers={},
        training=TrainingSettings({}),
        probes={},
        evaluation=replace(settings.evaluation, draft=draft),
    )


def _scaled(base: Settings, factor: float) -> Settings:
    """The settings with more or less text and steps. The evaluation only gets smaller."""

    def count(number: int, least: int) -> int:
        return max(least, int(float(f"{number * factor:.2g}")))

    def test(number: int) -> int:
        return max(1, round(number * min(1, factor)))

    train = {group: number if group == OWN else count(number, 16) for group, number in base.prompts.train.items()}
    stages = {
        name: replace(
            stage,
            steps=min(MOST_STEPS, count(stage.steps, 10)),
            replay={run: count(number, 16) for run, number in stage.replay.items()},
        )
        for name, stage in base.training.stages.items()
    }
    methods = [replace(method, prompts=test(method.prompts)) for method in base.evaluation.methods]
    return replace(
        base,
        chat=replace(base.chat, train=count(base.chat.train, 128) if base.chat.train else 0),
        code=replace(base.code, train_files=count(base.code.train_files, 16) if base.code.train_files else 0),
        prompts=replace(base.prompts, train=train),
        training=replace(base.training, stages=stages),
        evaluation=replace(base.evaluation, methods=methods),
    )


def _for_target(target: Target, machine: Machine, contexts: int, text: Sequence[str], own: int) -> Settings:
    """The unscaled recipe with everything that follows from target and machine."""
    tp_size = machine.tp_size(target)
    longest = _longest_row(target, machine, tp_size, contexts)
    last = max(longest // 2, longest - MARGIN)
    shortest = max(last // 15, min(600, last // 2))
    recipe = load_settings(RECIPE, [f"target={target.name}", f"prompts.contexts=[{shortest},{last}]"])
    recipe.tp_size, recipe.text = tp_size, list(text)
    if machine.gpus and tp_size == 1:
        # Two processes keep a GPU busy with short answers. As many for long prompts need no new start.
        runs: dict[str, ChatSettings | AnswerSettings] = {"chat": recipe.chat, **recipe.answers}
        for name, run in runs.items():
            batch = run.batch_size * (longest if name.startswith("long") else 2 * ROW) * target.slot_bytes
            run.processes = 2 if 2 * (target.bytes + batch) < TIGHT * machine.memory else 1
    for number, stage in enumerate(recipe.training.stages.values()):
        _fit_stage(stage, number, target, machine, longest if number else min(ROW, longest))
    # Otherwise the draft reads the layer at three fifths of the depth, as the trainer's recipe says.
    recipe.training.choose_layer = tp_size == 1 and target.config.num_hidden_layers > 4
    _fit_evaluation(recipe, last)
    if own:
        recipe.prompts.train[OWN], recipe.prompts.validation[OWN] = min(own, MOST_OWN), 32
        recipe.answers["short"].prompts.append(OWN)
        recipe.evaluation.tasks[OWN] = TaskSettings([0], 256)
    return recipe


def _longest_row(target: Target, machine: Machine, tp_size: int, contexts: int) -> int:
    """Tokens of a row in the stages with long prompts."""
    free = machine.memory - target.bytes / tp_size
    fitting = int(LONG_UNITS * free / target.config.hidden_size) if machine.gpus else contexts
    longest = min(contexts, target.positions, max(ROW, fitting))
    return longest // ROW * ROW or longest


def _fit_stage(stage: StageSettings, number: int, target: Target, machine: Machine, length: int) -> None:
    """Set rows, learning rate and draft of a stage. length: tokens of a row."""
    hidden = target.config.hidden_size
    rows = max(1, LONG_STEP // length) if number else FIRST_ROWS
    rows = -(-rows // machine.devices) * machine.devices
    stage.max_length, stage.tokens_per_step = length, rows * length
    stage.micro_batch = max(1, int(UNITS * machine.memory / hidden / length)) if machine.gpus else 4
    is_split = machine.tp_size(target) > 1
    optimizer = "muon" if machine.gpus and not is_split and has_muon() else "adamw"
    # Muon's 4e-3 is that of 576 hidden units. With 1,536, 6e-3 was better than 3e-3 in few steps (docs/reproduce.md).
    rate = RATES[optimizer] * min(1, 1536 / hidden) ** 0.25 * LATER_RATES[number]
    values: dict[str, Any] = {"optimizer": optimizer, "learning_rate": float(f"{rate:.2g}")}
    values["variant.max_offset"] = max(0, min(30_000, target.positions - 1200))
    if number == 0:
        values["model.target_feature"] = True
        values["model.mlp_size"] = min(target.config.intermediate_size, max(64, 8 * hidden // 3 // 64 * 64))
    if is_split:
        values["deepspeed"] = "zero3"
    if not machine.gpus:
        values |= {"data.num_proc": 1, "data.num_workers": 0}
    stage.overrides |= values


def _fit_evaluation(recipe: Settings, last: int) -> None:
    """Set the contexts of the evaluation. last: the longest one."""
    contexts = [*(context for context in (1024, 4096, 16384) if context < 0.8 * last), last]
    recipe.evaluation.tasks = {
        "chat": TaskSettings([0, *contexts], 256),
        "everyday": TaskSettings([0], 256),
        "lcc": TaskSettings(contexts, 128),
        "repobench-p": TaskSettings(contexts, 128),
    }
    for method in recipe.evaluation.methods:
        if method.name not in ("vanilla", "lookup", "tree", "auto") or method.temperatures != [0.0]:
            method.contexts = [0, last]  # each context costs a compilation
    if recipe.tp_size > 1:  # teacher-forced rounds run in one process
        return
    # The answers to the longest prompts again after the end of the prompt, so that only the context changes.
    recipe.evaluation.methods += [
        MethodSettings(f"forced-{context}", FORCED, prompts=12, contexts=[last], last_tokens=context)
        for context in (*contexts[:-1], None)
    ]
