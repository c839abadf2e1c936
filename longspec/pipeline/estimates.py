"""What the settings will take on a machine: seconds per step, tokens, disk.

Speeds are those of Qwen2.5-Coder-1.5B on one H100, scaled by parameters and multiprocessors. They are estimates.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from longspec.errors import UserError
from longspec.inference.memory import slot_bytes, weight_bytes
from longspec.models.families import family_class
from longspec.models.target_files import position_limit, read_config
from longspec.pipeline.answers import CHAT
from longspec.pipeline.cells import grid
from longspec.pipeline.prompts import length_range
from longspec.pipeline.settings import Settings

REFERENCE, WIDTH = 1.54e9, 1536
"""Parameters and hidden units of the target whose speeds are known."""
PASS, DECODE, HALF_BATCH = 268_000.0, 68_000.0, 128
"""Tokens/s of its forward pass in training, and of text that it writes in the largest batches. A batch of HALF_BATCH
rows has half of this speed."""
CONVERSATION_S = 1.5e-3
"""Further seconds per conversation: the prefills of its user turn and of its answer, and its text on the host."""
PREFILL, MOST_PREFILL = 0.4, 130_000.0
"""Speed of reading prompts to be answered: relative to PASS, and in tokens/s at most (of small targets on a GPU)."""
DRAFT_S, NARROW = 3.3e-6, 0.7
"""Seconds per token that its draft takes to train, and the part of it that the draft of a narrow target takes."""
FILLED, CHAT_FILLED = 0.6, 0.35
"""Mean length of answers to prompts, and of turns of conversations, relative to the longest."""
BANDWIDTH, CPU_BANDWIDTH, ROUND_S = 2.6e12, 1e10, 1e-3
"""Bytes/s at which weights are read for a single row, and the rest of a round in seconds."""
MULTIPROCESSORS, OLDER, CPU_SPEED = 132, 0.4, 1 / 5_000
"""Multiprocessors of an H100, the speed of one before Hopper relative to them, and that of a CPU core to an H100."""
COMFORTABLE, TIGHT = 0.6, 0.8
"""Largest shares of a GPU's memory for the weights: if there are more GPUs to share them, and if there are not."""
START_S, PROBE_START_S, SCORE_S, SEARCH_S = 25, 40, 4, 10
"""Seconds to start the processes of a step and to load the weights, for a probe also to tokenize, to score one of its
candidates, and to find source files."""
COMPOSED, FILE_TOKENS = 300_000, 4_800
"""Tokens/s of prompts that are composed, and mean tokens of a source file."""
WARM_UP_S = 0.5
"""Seconds of the first sample of a method, a temperature and a context on a GPU."""
ROUND_TOKENS, TREE_TOKENS = {"vanilla": 1.0, "lookup": 1.4, "magicdec": 1.5}, 2.5
"""Tokens per round, as far as they differ from those of a tree."""
TEXT_BYTES, STATE_BYTES = 12, 450
"""Bytes on disk per token of text (JSON, shards, token ids), and of a stage's saves per squared hidden unit."""


@dataclass(frozen=True)
class Target:
    name: str
    """As the user named it."""
    config: Any

    @classmethod
    def read(cls, name: str, path: str) -> Self:
        """The target at a path or hub id. Raises UserError if no pair class supports it, or if it is quantized."""
        config = read_config(path)
        family_class(config, path)
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{name}: is quantized; train the draft for the unquantized weights, and use it with both")
        return cls(name, config)

    @cached_property
    def bytes(self) -> int:
        """Size of the weights in bf16."""
        return weight_bytes(self.config, torch.bfloat16)

    @property
    def parameters(self) -> float:
        return self.bytes / 2

    @property
    def positions(self) -> int:
        """Context length in tokens."""
        return position_limit(self.config)

    @property
    def slot_bytes(self) -> int:
        """Size of the keys and values of a token."""
        return slot_bytes(self.config, torch.bfloat16)


@dataclass(frozen=True)
class Machine:
    gpus: int
    """0 on a CPU."""
    memory: int
    """Bytes of a GPU, or of the host."""
    speed: float
    """Of a GPU, or of all cores, relative to one H100."""
    name: str

    @classmethod
    def here(cls) -> Self:
        """This machine; its GPUs are assumed to be alike."""
        if not torch.cuda.is_available():
            cores = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else 1
            return cls(0, psutil.virtual_memory().total, cores * CPU_SPEED, f"{cores} CPU cores")
        gpu, gpus = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        speed = gpu.multi_processor_count / MULTIPROCESSORS * (1 if gpu.major >= 9 else OLDER)
        return cls(gpus, gpu.total_memory, speed, f"{gpus} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB each")

    @property
    def devices(self) -> int:
        return max(1, self.gpus)

    def tp_size(self, target: Target) -> int:
        """Number of GPUs that should share the target. Raises UserError if there are too few."""
        if not self.gpus:
            return 1
        heads = target.config.num_key_value_heads
        possible = [size for size in (1, 2, 4, 8) if size <= self.gpus and heads % size == 0]
        for share, sizes in ((COMFORTABLE, possible), (TIGHT, possible[-1:])):
            for size in sizes:
                if target.bytes / size <= share * self.memory:
                    return size
        raise UserError(
            f"{target.name}: its weights have {target.bytes / 2**30:.0f} GiB, which {possible[-1]} of the GPUs here "
            f"cannot share ({self.name}, {heads} KV heads); use larger or more GPUs"
        )


def pass_seconds(target: Target, machine: Machine, tokens: float, length: float) -> float:
    """Seconds of one GPU for a forward pass over `tokens` tokens in texts of `length` tokens."""
    config = target.config
    attention = 1 + config.num_hidden_layers * config.hidden_size * length / target.parameters
    return tokens * attention / (PASS * machine.speed * REFERENCE / target.parameters)


def decode_seconds(target: Target, machine: Machine, tokens: float, batch: int) -> float:
    """Seconds of one GPU for `tokens` new tokens of batches of `batch` rows."""
    scale = REFERENCE / target.parameters
    if machine.gpus and scale > 1:
        scale **= 0.18  # rounds of a small target cost launches, not arithmetic
    speed = DECODE * machine.speed * scale
    return tokens / (speed * batch / (batch + HALF_BATCH))


def draft_seconds(target: Target, machine: Machine, tokens: float) -> float:
    """Seconds of one GPU to train a draft on `tokens` tokens, without the target's pass."""
    width = (target.config.hidden_size / WIDTH) ** 1.5
    return tokens * DRAFT_S / machine.speed * max(NARROW if machine.gpus else 0, width)


def round_seconds(target: Target, machine: Machine, context: float) -> float:
    """Seconds of a round of a single row."""
    read = target.bytes + context * target.slot_bytes
    return ROUND_S + read / (BANDWIDTH * machine.speed if machine.gpus else CPU_BANDWIDTH)


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
    conversations = chat.train + chat.validation + chat.test
    new = conversations * CHAT_FILLED * (chat.max_turn_tokens / 2 + chat.max_new_tokens)
    tokens = {CHAT: new}
    writing = decode_seconds(target, machine, new, chat.batch_size) + conversations * CONVERSATION_S
    seconds = {CHAT: START_S + writing / devices}
    text = sum(count * mean_length(settings, group) for counts in asked for group, count in counts.items())
    text += sum(
        (task.prompts or settings.prompts.test) * sum(task.contexts) for task in settings.evaluation.tasks.values()
    )
    seconds["prompts"] = SEARCH_S + text / COMPOSED

    # Runs that follow one another share their processes if they have equally many.
    starts = START_S * len(list(groupby(run.processes for run in settings.answers.values())))
    for run in settings.answers.values():
        counts = {group: sum(counts.get(group, 0) for counts in asked) for group in run.prompts}
        new = sum(counts.values()) * FILLED * run.max_new_tokens
        work = decode_seconds(target, machine, new, run.batch_size)
        for group, count in counts.items():
            mean = mean_length(settings, group)
            read = count * mean
            least = read / (MOST_PREFILL * machine.speed) if machine.gpus else 0.0
            work += max(pass_seconds(target, machine, read, mean) / PREFILL, least)
        tokens["answers"] = tokens.get("answers", 0) + new
        seconds["answers"] = seconds.get("answers", starts) + work / devices
    if settings.training.choose_layer:
        seconds["layer"] = START_S
    for probe in settings.probes.values():
        first = next(iter(settings.training.stages.values()))
        rows = int(probe.shared.get("per_device_train_batch_size", first.tokens_per_step // first.max_length))
        step = pass_seconds(target, machine, rows * first.max_length, first.max_length)
        drafts = len(probe.candidates)
        step += drafts * draft_seconds(target, machine, rows * first.max_length) / 2
        seconds["probes"] = seconds.get("probes", 0) + PROBE_START_S + drafts * SCORE_S + probe.steps * step
    for name, stage in settings.training.stages.items():
        tokens[name] = stage.steps * stage.tokens_per_step
        work = pass_seconds(target, machine, tokens[name], stage.max_length)
        seconds[name] = 2 * START_S + (work + draft_seconds(target, machine, tokens[name])) / devices
    seconds["evaluation"] = START_S + _evaluation_seconds(settings, target, machine)
    text += tokens[CHAT] + tokens.get("answers", 0) + settings.code.train_files * FILE_TOKENS
    saves = len(settings.training.stages) * STATE_BYTES * target.config.hidden_size**2
    return Estimate(seconds, tokens, TEXT_BYTES * text + saves)


def mean_length(settings: Settings, group: str) -> float:
    """Mean length of a group's prompts in tokens; 0 for bare questions."""
    first, last = length_range(settings, group)
    return (last - first) / math.log(last / first) if last > first else last


def _evaluation_seconds(settings: Settings, target: Target, machine: Machine) -> float:
    """Seconds for all samples, and for the first one of each kind on each device."""
    samples, kinds = 0.0, set()
    for name, context, method in grid(settings.evaluation):
        task = settings.evaluation.tasks[name]
        rounds = task.max_new_tokens / ROUND_TOKENS.get(method.kind, TREE_TOKENS)
        one = pass_seconds(target, machine, context, context) + rounds * round_seconds(target, machine, context)
        samples += one * (task.prompts or method.prompts) * len(method.temperatures)
        kinds |= {(method.name, temperature, context) for temperature in method.temperatures}
    return samples / machine.devices + (WARM_UP_S * len(kinds) if machine.gpus else 0)


def free_disk(folder: Path) -> int:
    """Free bytes of the disk that holds a folder or will hold it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return int(psutil.disk_usage(str(existing)).free)
