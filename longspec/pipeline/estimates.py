"""What the settings will take: seconds per step, tokens, disk."""

import math
from dataclasses import dataclass
from pathlib import Path

import psutil

from longspec.pipeline.answers import CHAT
from longspec.pipeline.machine import (
    CHAT_FILLED,
    FILLED,
    PREFILL,
    Machine,
    Target,
    decode_seconds,
    draft_seconds,
    pass_seconds,
    round_seconds,
)
from longspec.pipeline.prompts import length_range
from longspec.pipeline.settings import Settings

START_S, PROBE_START_S = 25, 130
"""Seconds to start the processes of a step and to load the weights; for a probe also to tokenize and to score."""
COMPOSED = 300_000
"""Tokens/s of prompts that are composed."""
WARM_UP_S = 3.5
"""Seconds of the first sample of a method, a temperature and a context on a GPU."""
ROUND_TOKENS, TREE_TOKENS = {"vanilla": 1.0, "lookup": 1.4, "magicdec": 1.5}, 2.5
"""Tokens per round, as far as they differ from those of a tree."""
TEXT_BYTES, STATE_BYTES = 12, 450
"""Bytes on disk per token of text (JSON, shards, token ids), and of a stage's saves per squared hidden unit."""


@dataclass(frozen=True)
class Estimate:
    """Seconds by step, in order, and what they write."""

    seconds: dict[str, float]
    tokens: dict[str, float]
    """New tokens of the target, or tokens that a stage trains on, by step."""
    disk: float
    """Bytes."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def estimate(settings: Settings, target: Target, machine: Machine) -> Estimate:
    """The estimate for all steps of the settings."""
    asked = [settings.prompts.train, settings.prompts.validation]
    chat, devices = settings.chat, machine.devices
    new = (chat.train + chat.validation + chat.test) * CHAT_FILLED * (chat.max_turn_tokens / 2 + chat.max_new_tokens)
    tokens = {CHAT: new}
    seconds = {CHAT: START_S + decode_seconds(target, machine, new, chat.batch_size) / devices}
    text = sum(count * mean_length(settings, group) for counts in asked for group, count in counts.items())
    text += sum(
        (task.prompts or settings.prompts.test) * sum(task.contexts) for task in settings.evaluation.tasks.values()
    )
    seconds["prompts"] = START_S + text / COMPOSED

    for run in settings.answers.values():
        counts = {group: sum(counts.get(group, 0) for counts in asked) for group in run.prompts}
        new = sum(counts.values()) * FILLED * run.max_new_tokens
        work = decode_seconds(target, machine, new, run.batch_size)
        for group, count in counts.items():
            mean = mean_length(settings, group)
            work += pass_seconds(target, machine, count * mean, mean) / PREFILL
        tokens["answers"] = tokens.get("answers", 0) + new
        seconds["answers"] = seconds.get("answers", START_S) + work / devices
    for probe in settings.probes.values():
        first = next(iter(settings.training.stages.values()))
        rows = int(probe.shared.get("per_device_train_batch_size", first.tokens_per_step // first.max_length))
        step = pass_seconds(target, machine, rows * first.max_length, first.max_length)
        step += len(probe.candidates) * draft_seconds(target, machine, rows * first.max_length) / 2
        seconds["probes"] = seconds.get("probes", 0) + PROBE_START_S + probe.steps * step
    for name, stage in settings.training.stages.items():
        tokens[name] = stage.steps * stage.tokens_per_step
        work = pass_seconds(target, machine, tokens[name], stage.max_length)
        seconds[name] = 2 * START_S + (work + draft_seconds(target, machine, tokens[name])) / devices
    seconds["evaluation"] = START_S + _evaluation_seconds(settings, target, machine)
    text += tokens[CHAT] + tokens.get("answers", 0)
    drafts = len(settings.training.stages) * STATE_BYTES * target.config.hidden_size**2
    return Estimate(seconds, tokens, TEXT_BYTES * text + drafts)


def mean_length(settings: Settings, group: str) -> float:
    """Mean length of a group's prompts in tokens; 0 for bare questions."""
    first, last = length_range(settings, group)
    return (last - first) / math.log(last / first) if last > first else last


def _evaluation_seconds(settings: Settings, target: Target, machine: Machine) -> float:
    """Seconds for all samples, and for the first one of each kind on each device."""
    samples, kinds = 0.0, set()
    for name, task in settings.evaluation.tasks.items():
        for method in settings.evaluation.methods:
            for context in task.contexts:
                if name in (method.tasks or [name]) and context in (method.contexts or [context]):
                    rounds = task.max_new_tokens / ROUND_TOKENS.get(method.kind, TREE_TOKENS)
                    one = pass_seconds(target, machine, context, context)
                    one += rounds * round_seconds(target, machine, context)
                    samples += one * (task.prompts or method.prompts) * len(method.temperatures)
                    kinds |= {(method.name, temperature, context) for temperature in method.temperatures}
    return samples / machine.devices + (WARM_UP_S * len(kinds) if machine.gpus else 0)


def free_disk(folder: Path) -> int:
    """Free bytes of the disk that holds a folder or will hold it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return int(psutil.disk_usage(str(existing)).free)
