"""The facts about target and machine that sizes and estimates follow from.

Speeds are those of Qwen2.5-Coder-1.5B on one H100, scaled by parameters and multiprocessors. They are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psutil
import torch

from longspec.errors import UserError
from longspec.inference.memory import slot_bytes, weight_bytes
from longspec.models.families import family_class
from longspec.models.target_files import position_limit, read_config

REFERENCE, WIDTH = 1.54e9, 1536
"""Parameters and hidden units of the target whose speeds are known."""
PASS, DECODE, HALF_BATCH = 268_000.0, 36_000.0, 256
"""Tokens/s of its forward pass in training, and of text that it writes in the largest batches. A batch of HALF_BATCH
rows has half of this speed."""
PREFILL = 0.4
"""Speed of reading prompts to be answered, relative to PASS."""
DRAFT_S, NARROW = 4e-6, 0.7
"""Seconds per token that its draft takes to train, and the part of it that the draft of a narrow target takes."""
FILLED, CHAT_FILLED = 0.75, 0.5
"""Mean length of answers to prompts, and of turns of conversations, relative to the longest."""
BANDWIDTH, CPU_BANDWIDTH, ROUND_S = 2.6e12, 1e10, 1e-3
"""Bytes/s at which weights are read for a single row, and the rest of a round in seconds."""
MULTIPROCESSORS, OLDER, CPU_SPEED = 132, 0.4, 1 / 20_000
"""Multiprocessors of an H100, the speed of one before Hopper relative to them, and that of a CPU core to an H100."""
COMFORTABLE, TIGHT = 0.6, 0.8
"""Largest shares of a GPU's memory for the weights: if there are more GPUs to share them, and if there are not."""


@dataclass(frozen=True)
class Target:
    name: str
    """As the user named it."""
    config: Any
    """That of transformers."""

    @classmethod
    def read(cls, name: str, path: str) -> Target:
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
    def here(cls) -> Machine:
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
    # Rounds of a small target on a GPU cost launches, not arithmetic.
    speed = DECODE * machine.speed * (min(1.0, scale) if machine.gpus else scale)
    return tokens / (speed * batch / (batch + HALF_BATCH))


def draft_seconds(target: Target, machine: Machine, tokens: float) -> float:
    """Seconds of one GPU to train a draft on `tokens` tokens, without the target's pass."""
    width = (target.config.hidden_size / WIDTH) ** 1.5
    return tokens * DRAFT_S / machine.speed * max(NARROW if machine.gpus else 0, width)


def round_seconds(target: Target, machine: Machine, context: float) -> float:
    """Seconds of a round of a single row."""
    read = target.bytes + context * target.slot_bytes
    return ROUND_S + read / (BANDWIDTH * machine.speed if machine.gpus else CPU_BANDWIDTH)
