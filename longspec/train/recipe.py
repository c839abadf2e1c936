"""The values `auto` of a configuration: what follows from the target, the device and the length of a row.

They are the embedded draft's (docs/reproduce.md), scaled to the target: with 30 layers, 576 hidden units and a
vocabulary of 49,152 tokens they are its own.
"""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import deepspeed
import torch
from packaging.version import Version
from transformers import PreTrainedConfig

from longspec.models.draft_files import draft_of_pair
from longspec.models.draft_layer import GLIDE
from longspec.models.families import family_class
from longspec.models.target_cache import resolve_target
from longspec.models.target_files import read_config
from longspec.ranks.agreement import launched_ranks
from longspec.train.config_schema import TrainConfig
from longspec.train.generations import holds_run
from longspec.untrusted import read_yaml

AUTO = "auto"
TOKENS_PER_STEP = 16384
EPOCHS, MOST_EPOCHS = 8, 24
ENOUGH_STEPS, MOST_STEPS = 1000, 6000
FEW_STEPS = 500
"""A fresh draft that trained for fewer steps is often slower than prompt lookup."""
RATES = {"muon": 4e-3, "adamw": 1e-3}
"""Learning rates for 576 hidden units. They fall with the square root of the width."""
LONGEST_LIST = 32768
"""Size of the draft's list for a large vocabulary. A draft proposes all tokens of a vocabulary up to this size."""
UNITS_PER_BYTE = 2**25 / (80 * 2**30)
"""Tokens of a micro-batch times hidden units, per byte of the GPU's memory."""
CPU_BYTES = 8 * 2**30
"""Memory that the micro-batches of a CPU may assume."""
AUTO_KEYS: dict[str, Any] = {
    "model._target_": "",
    "model.torch_dtype": "float32",
    "model.kv_layers": [],
    "model.draft_vocabulary": None,
    "optimizer": "adamw",
    "learning_rate": 1.0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}
"""Keys that may be `auto`, each with a value of its type. Later values depend on earlier ones."""
MUON_FROM = "0.19.8"
"""Oldest supported DeepSpeed version for Muon. Earlier ones have no Muon for bf16."""


def recipe_steps(rows: int, rows_per_step: int) -> int:
    """EPOCHS epochs, or up to MOST_EPOCHS while that is less than ENOUGH_STEPS steps; at most MOST_STEPS steps."""
    epoch = rows / rows_per_step
    return min(MOST_STEPS, math.ceil(max(EPOCHS * epoch, min(ENOUGH_STEPS, MOST_EPOCHS * epoch))))


def has_muon() -> bool:
    """Whether the installed DeepSpeed has a Muon that trains bf16."""
    return Version(deepspeed.__version__) >= Version(MUON_FROM)


def muon_fits(zero: Mapping[str, Any], torch_dtype: str, tp_size: int) -> bool:
    """Whether DeepSpeed clips the gradient with Muon. With other settings, it clips the update, of constant norm."""
    plain = zero.get("stage") == 1 and not zero.get("offload_optimizer") and tp_size == 1
    return plain and torch_dtype == "bfloat16"


def set_auto_values(run: TrainConfig, keys: Sequence[str], ranks: int | None = None) -> None:
    """Set the `keys` that are `auto`, in place. Reads the target's config.json. ranks: as of `load_config`."""
    if not keys:
        return
    saved = run.saved_config
    folder = resolve_target(str(read_yaml(saved).get("model_name_or_path")) if saved else run.model_name_or_path)
    target = read_config(folder)
    # A run that starts from a draft or resumes takes the draft's architecture.
    has_draft = run.draft_model_name_or_path is not None or saved is not None or draft_of_pair(folder) is not None
    fresh = not has_draft and not (run.resume and holds_run(Path(run.output_dir)))
    for key in keys:
        section, _, option = key.rpartition(".")
        setattr(attrgetter(section)(run) if section else run, option, auto_value(key, run, target, fresh, ranks))


def auto_value(key: str, run: TrainConfig, target: PreTrainedConfig, fresh: bool, ranks: int | None) -> Any:
    """The value of a key that is `auto`. fresh: whether the run starts without a draft."""
    width = target.hidden_size
    match key:
        case "model._target_":
            return f"longspec.{family_class(target, str(run.model_name_or_path)).__name__}.from_pretrained"
        case "model.torch_dtype":
            # Arithmetic in bf16 is slow on most CPUs.
            return "bfloat16" if torch.cuda.is_available() else "float32"
        case "model.kv_layers":
            # Layer 18 of 30, in proportion.
            layer = 3 * target.num_hidden_layers // 5
            reads_layer = fresh and run.model.architecture == GLIDE and layer < target.num_hidden_layers - 1
            return [layer] if reads_layer else []
        case "model.draft_vocabulary":
            if not fresh or target.vocab_size <= LONGEST_LIST:
                return None
            return min(LONGEST_LIST, _power_of_two(target.vocab_size // 3))
        case "optimizer":
            fits = muon_fits(run.deepspeed.zero_optimization, run.model.torch_dtype, run.tp_size)
            return "muon" if fits and has_muon() else "adamw"
        case "learning_rate":
            return float(f"{RATES.get(run.optimizer, RATES['adamw']) * math.sqrt(576 / width):.2g}")
        case "per_device_train_batch_size":
            # As many rows as the device's memory allows.
            memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else CPU_BYTES
            tokens = int(UNITS_PER_BYTE * memory / width)
            return _power_of_two(min(tokens // run.data.max_length, _rows_per_rank(run, ranks)))
        case "gradient_accumulation_steps":
            return math.ceil(_rows_per_rank(run, ranks) / run.per_device_train_batch_size)
    raise KeyError(key)


def _rows_per_rank(run: TrainConfig, ranks: int | None) -> int:
    """Rows of a rank in a step of TOKENS_PER_STEP tokens."""
    ranks = ranks or launched_ranks()[1]
    return math.ceil(TOKENS_PER_STEP / run.data.max_length / max(1, ranks // run.tp_size))


def _power_of_two(limit: int) -> int:
    """The largest power of two up to `limit`, at least 1."""
    return 1 << max(0, limit.bit_length() - 1)
