"""Checks of a configuration's values. Each raises UserError with the full name of the key."""

import os
from collections.abc import Sequence
from typing import Any

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from longspec.data.lines import data_files
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.data.templates import check_templates
from longspec.errors import UserError
from longspec.kernels.training.varlen_flash import resolve_attention
from longspec.models.draft_layer import GLIDE
from longspec.train.config_schema import TrainConfig
from longspec.train.losses import LOSSES
from longspec.train.recipe import MUON_FROM, has_muon, muon_fits


def check(config: TrainConfig) -> None:
    """Check what the schema cannot tell, and that the data files exist. Raises UserError with the key's name."""
    _check_choice("loss", config.loss, tuple(LOSSES))
    _check_choice("data.chat_format", config.data.chat_format, CHAT_FORMAT_CHOICES)
    check_templates(config.data.templates, "config key data.templates")
    resolve_attention(config.model.attn_implementation)
    _check_zero(config.deepspeed.zero_optimization)
    has_all_logits = config.tp_size == 1 or LOSSES[config.loss].per_token is None
    _require(has_all_logits, "tp_size: must be 1 with a registered loss, which needs all logits")
    _require(not (config.resume and config.overwrite_output_dir), "overwrite_output_dir: must be false with resume")
    _require(config.output_dir.strip() != "", "output_dir: must name a folder")

    depth, window = config.variant.largest_lag, config.model.draft_options.window
    _require(depth > 0, "variant.depth: must be positive")
    key = "model.window" if config.model.architecture == GLIDE else "model.architecture_options.window"
    _require(window > depth, f"{key}: {window}; it must be greater than the largest trained lag, {depth}")

    if config.optimizer == "muon":
        fits = muon_fits(config.deepspeed.zero_optimization, config.model.torch_dtype, config.tp_size)
        _require(fits, "optimizer: muon needs ZeRO-1 without offload, bfloat16 and tp_size=1")
        _require(has_muon(), f"optimizer: must be adamw with deepspeed < {MUON_FROM}")

    has_held_out = config.evaluation.files is not None
    _require(has_held_out or not config.evaluation.keep_best, "evaluation.keep_best: needs evaluation.files")
    shared = sorted(_real_files(config.data.files) & _real_files(config.evaluation.files))
    _require(not shared, f"evaluation.files: {''.join(shared[:1])} is also in data.files; give files that do not train")


def _check_zero(section: dict[str, Any]) -> None:
    _check_choice("deepspeed.zero_optimization.stage", section.get("stage"), (1, 2, 3))
    if offload := section.get("offload_optimizer"):
        device = offload.get("device") if isinstance(offload, dict) else offload
        _check_choice("deepspeed.zero_optimization.offload_optimizer.device", device, ("cpu",))
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        # One problem per launch: the first often causes the others.
        first = error.errors()[0]
        key = ".".join(map(str, ("deepspeed.zero_optimization", *first["loc"])))
        raise UserError(f"config key {key}: {first['msg']}, not {first['input']!r}") from error


def _check_choice(key: str, value: object, allowed: Sequence[object]) -> None:
    _require(value in allowed, f"{key}: must be one of {', '.join(map(str, allowed))}, not {value!r}")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise UserError(f"config key {problem}")


def _real_files(files: list[str] | None) -> set[str]:
    """The paths of all data files, without links: a link to a training file must not pass as held-out data."""
    return {os.path.realpath(file) for file in data_files(files)} if files is not None else set()
