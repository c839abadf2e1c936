"""The facts about target and machine that sizes and estimates follow from.

Speeds are those of Qwen2.5-Coder-1.5B on one H100, scaled by parameters and multiprocessors. They are estimates.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from longspec.errors import UserError
from longspec.inference.memory import slot_bytes, weight_bytes
from longspec.models.families import family_class
from longspec.models.target_files import position_limit, read_config

REFERENCE = 1.54e9
"""Parameters of the target whose speeds are known."""
PASS = 268_000.0
"""Tokens/s of its forward pass in training, and in the prefill."""
DECODE = 24_000.0
"""New tokens/s of text that it writes in batches of DECODE_BATCH."""
DECODE_BATCH = 256
DRAFT_S = 2e-6
"""Seconds per token that a draft of a target of WIDTH hidden units takes to train. A narrow one takes NARROW of it."""
WIDTH, NARROW = 1536, 0.7
BANDWIDTH = 2.6e12
"""Bytes/s at which weights are read for a single row."""
CPU_BANDWIDTH = 1e10
ROUND_S = 1e-3
"""Seconds of a round apart from reading the weights."""
MULTIPROCESSORS = 132
OLDER = 0.4
"""Speed of a multiprocessor before Hopper, relative to a newer one."""
CPU_SPEED = 1 / 20_000
"""Speed of a CPU core, relative to an H100."""
FILLED = 0.5
"""Mean length of an answer, relative to the longest."""
COMFORTABLE, TIGHT = 0.6, 0.8
"""Largest shares of a GPU's memory for the weights: if there are more GPUs to share them, and if there are not."""


@dataclass(frozen=True)
class Target:
    name: str
    """As the user named it."""
    family: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    positions: int
    """Context length in tokens."""
    slot_bytes: int
    """Size of the keys and values of a token."""

    @classmethod
    def read(cls, name: str, path: str) -> Target:
        """The facts in the target's config.json. Raises UserError for a target that no pair class supports."""
        config = read_config(path)
        return cls(
            name,
            family_class(config, path).__name__,
            weight_bytes(config, torch.bfloat16) / 2,
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_key_value_heads,
            position_limit(config),
            slot_bytes(config, torch.bfloat16),
        )

    @property
    def bytes(self) -> float:
        """Size of the weights in bf16."""
        return 2 * self.parameters

    @property
    def draft_parameters(self) -> float:
        """Roughly those of a draft with an MLP of 8/3 of the width."""
        return 14 * self.hidden**2


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
    def here(cls) -> Machine:
        """This machine; its GPUs are assumed to be alike."""
        if not torch.cuda.is_available():
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            return cls(0, psutil.virtual_memory().total, cores * CPU_SPEED, f"{cores} CPU cores")
        gpu = torch.cuda.get_device_properties(0)
        speed = gpu.multi_processor_count / MULTIPROCESSORS * (1 if gpu.major >= 9 else OLDER)
        gpus = torch.cuda.device_count()
        return cls(gpus, gpu.total_memory, speed, f"{gpus} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB each")

    @property
    def devices(self) -> int:
        return max(1, self.gpus)

    def tp_size(self, target: Target) -> int:
        """Number of GPUs that should share the target. Raises UserError if there are too few."""
        if not self.gpus:
            return 1
        possible = [size for size in (1, 2, 4, 8) if size <= self.gpus and target.kv_heads % size == 0]
        for share, sizes in ((COMFORTABLE, possible), (TIGHT, possible[-1:])):
            for size in sizes:
                if target.bytes / size <= share * self.memory:
                    return size
        raise UserError(
            f"{target.name}: its weights have {target.bytes / 2**30:.0f} GiB, which {possible[-1]} of the GPUs here "
            f"cannot share ({self.name}, {target.kv_heads} KV heads); use larger or more GPUs"
        )


def pass_seconds(target: Target, machine: Machine, tokens: float, length: float) -> float:
    """Seconds of one GPU for a forward pass over `tokens` tokens in texts of `length` tokens."""
    attention = 1 + target.layers * target.hidden * length / target.parameters
    return tokens * attention / (PASS * machine.speed * REFERENCE / target.parameters)


def decode_seconds(target: Target, machine: Machine, tokens: float, batch: int) -> float:
    """Seconds of one GPU for `tokens` new tokens of batches of `batch` rows."""
    # A small target's rounds cost launches, not arithmetic.
    speed = DECODE * machine.speed * min(1.0 if machine.gpus else 1e9, REFERENCE / target.parameters)
    return tokens / (speed * 2 * batch / (batch + DECODE_BATCH))


def draft_seconds(target: Target, machine: Machine, tokens: float) -> float:
    """Seconds of one GPU to train a draft on `tokens` tokens, without the target's pass."""
    return tokens * DRAFT_S / machine.speed * max(NARROW if machine.gpus else 0, (target.hidden / WIDTH) ** 1.5)


def round_seconds(target: Target, machine: Machine, context: float) -> float:
    """Seconds of a round of a single row."""
    read = target.bytes + context * target.slot_bytes
    return ROUND_S + read / (BANDWIDTH * machine.speed if machine.gpus else CPU_BANDWIDTH)


def free_disk(folder: Path) -> int:
    """Free bytes of the disk that holds a folder or will hold it."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return psutil.disk_usage(str(existing)).free
