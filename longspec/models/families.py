"""The families of targets and the pair class of each. No other module lists them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from longspec.errors import UserError

if TYPE_CHECKING:  # `import longspec` reads this table and must not wait for torch
    from transformers import PreTrainedConfig

    from longspec.models.glide import GlideMixin

FAMILIES = {"llama": "LlamaGlide", "qwen2": "Qwen2Glide", "qwen3": "Qwen3Glide", "mistral": "MistralGlide"}
"""Name of the pair class by the target's `model_type`, which also names the class's module in `longspec.models`."""
PUBLISHED_MODULES = {"llama": "longspec.train.models.llama_glide", "qwen2": "longspec.train.models.qwen2_glide"}
"""Modules that the configs of the published drafts name."""


def class_of(family: str) -> type[GlideMixin]:
    """The pair class of a family of FAMILIES."""
    return getattr(import_module(f"longspec.models.{family}"), FAMILIES[family])


def family_class(config: PreTrainedConfig, target: str) -> type[GlideMixin]:
    """The pair class for a target with `config`. Raises UserError for a family or attention that is not supported."""
    if config.model_type not in FAMILIES:
        raise UserError(f"{target}: a {config.model_type} target; the supported families are {', '.join(FAMILIES)}")
    pair = class_of(config.model_type)
    pair.check_family(config, target)
    return pair


def pair_class(target: str) -> type[GlideMixin]:
    """The class named by the config key `model._target_`: the `from_pretrained` of a pair class. The name comes from a
    file, so it is compared with known names and never imported. Raises UserError."""
    for family, name in FAMILIES.items():
        # Published configs name their own module; ours name `longspec` or `longspec.models`.
        modules = {"longspec", f"longspec.models.{family}", PUBLISHED_MODULES.get(family)}
        if target in {f"{module}.{name}.from_pretrained" for module in modules}:
            return class_of(family)
    known = ", ".join(f"longspec.{name}.from_pretrained" for name in FAMILIES.values())
    raise UserError(f"config key model._target_: must be one of {known}, not {target!r}")
