"""What the settings will take: seconds per step, tokens, disk."""

from __future__ import annotations

from dataclasses import dataclass

from longspec.pipeline.answers import CHAT
from longspec.pipeline.machine import (
    FILLED,
    Machine,
    Target,
    decode_seconds,
    draft_seconds,
    pass_seconds,
    round_seconds,
)
from longspec.pipeline.prompts import planned_lengths
from longspec.pipeline.settings import MethodSettings, Settings
from longspec.pipeline.sources import SPLITS

START_S = 25
"""Seconds to start the processes of a step and to load the weights."""
TOKENIZED = 300_000
"""Tokens/s of prompts that are composed."""
ROUND_TOKENS = {"vanilla": 1.0, "lookup": 1.4, "magicdec": 1.5}
"""Tokens per round, as far as they differ from those of a tree."""
TREE_TOKENS = 2.5
TEXT_BYTES = 12
"""Bytes on disk per token of text: JSON, shards, and the trainer's token ids."""
STATE_BYTES = 2 * 16
"""Bytes of a stage's checkpoints per parameter of the draft: two saves of weights, master weights and optimizer."""


@dataclass(frozen=True)
class Estimate:
    """Seconds by step, in order, and the bytes and tokens that they write."""

    seconds: dict[str, float]
    tokens: dict[str, float]
    """New tokens of a run of the target, or tokens that a stage trains on."""
    disk: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def estimate(settings: Settings, target: Target, machine: Machine) -> Estimate:
    """The estimate for all steps of the settings."""
    lengths = {split: planned_lengths(settings, split) for split in SPLITS}
    seconds: dict[str, float] = {}
    tokens: dict[str, float] = {}

    chat = settings.chat
    tokens[CHAT] = (
        (chat.train + chat.validation + chat.test) * FILLED * (chat.max_turn_tokens / 2 + chat.max_new_tokens)
    )
    seconds[CHAT] = START_S + decode_seconds(target, machine, tokens[CHAT], chat.batch_size) / machine.devices
    read: float = sum(sum(counts) for by_group in lengths.values() for counts in by_group.values())
    seconds["prompts"] = START_S + read / TOKENIZED
    writing = 0.0
    for name, run in settings.answers.items():
        prompts = [one for split in SPLITS[:2] for group in run.prompts for one in lengths[split].get(group, [])]
        tokens[name] = len(prompts) * FILLED * run.max_new_tokens
        mean = sum(prompts) / max(1, len(prompts))
        writing += pass_seconds(target, machine, sum(prompts), mean)
        writing += decode_seconds(target, machine, tokens[name], run.batch_size)
        read += sum(prompts) + tokens[name]
    if settings.answers:
        seconds["answers"] = START_S + writing / machine.devices

    probing = 0.0
    for probe in settings.probes.values():
        first = next(iter(settings.training.stages.values()))
        step = int(probe.shared.get("per_device_train_batch_size", first.tokens_per_step // first.max_length))
        step *= first.max_length
        one = pass_seconds(target, machine, step, first.max_length)
        one += len(probe.candidates) * draft_seconds(target, machine, step)
        probing += probe.steps * one
    if settings.probes:
        seconds["probes"] = START_S + probing
    for name, stage in settings.training.stages.items():
        tokens[name] = stage.steps * stage.tokens_per_step
        work = pass_seconds(target, machine, tokens[name], stage.max_length)
        work += 2 * draft_seconds(target, machine, tokens[name])
        seconds[name] = 2 * START_S + work / machine.devices
    seconds["evaluation"] = START_S + _evaluation(settings, target, machine) / machine.devices
    disk = TEXT_BYTES * (read + tokens[CHAT])
    disk += len(settings.training.stages) * STATE_BYTES * target.draft_parameters
    return Estimate(seconds, tokens, disk)


def _evaluation(settings: Settings, target: Target, machine: Machine) -> float:
    """Seconds of one GPU for all samples."""
    return sum(
        _sample(method, task.max_new_tokens, context, target, machine)
        * (task.prompts or method.prompts)
        * sum(method.seeds if temperature else 1 for temperature in method.temperatures)
        for name, task in settings.evaluation.tasks.items()
        for context in task.contexts
        for method in settings.evaluation.methods
        if name in (method.tasks or [name]) and context in (method.contexts or [context])
    )


def _sample(method: MethodSettings, new_tokens: int, context: int, target: Target, machine: Machine) -> float:
    rounds = new_tokens / ROUND_TOKENS.get(method.kind, TREE_TOKENS)
    prefill = pass_seconds(target, machine, context, context)
    return prefill + rounds * round_seconds(target, machine, context)
