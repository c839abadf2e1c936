"""The families of targets, and the class of pairs for each: the one place that lists them."""

from __future__ import annotations

from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide

FAMILIES: dict[str, type[GlideMixin]] = {"llama": LlamaGlide, "qwen2": Qwen2Glide}
"""By the target's `model_type`."""
PAIR_TARGETS: dict[str, type[GlideMixin]] = {
    f"{module}.{pair.__name__}.from_pretrained": pair
    for family, pair in FAMILIES.items()
    for module in (f"longspec.train.models.{family}_glide", pair.__module__, "longspec")
}
"""Accepted values of the config key `model._target_`. A name from a config file is looked up here, never imported."""


def family_class(config: PreTrainedConfig, target: str) -> type[GlideMixin]:
    """The pair class for a target with `config`; UserError for a family without one."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{target}: a {config.model_type} target; the supported families are {known}")
    return FAMILIES[config.model_type]


def pair_class(target: str) -> type[GlideMixin]:
    """The class that `model._target_` names. Raises UserError for anything but the `from_pretrained` of a pair."""
    if target not in PAIR_TARGETS:
        known = ", ".join(name for name in PAIR_TARGETS if name.startswith("longspec.train."))
        raise UserError(f"config key model._target_: must be one of {known}, not {target!r}")
    return PAIR_TARGETS[target]
