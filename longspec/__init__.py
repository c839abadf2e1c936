"""LongSpec: lossless speculative decoding for long contexts."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspec.models import generation
from longspec.models.families import FAMILIES
from longspec.version import __version__ as __version__

if TYPE_CHECKING:
    from longspec.inference.generate import generate
    from longspec.inference.load_pair import load_pair
    from longspec.models.glide import GlideMixin
    from longspec.models.llama import LlamaGlide
    from longspec.models.mistral import MistralGlide
    from longspec.models.qwen2 import Qwen2Glide
    from longspec.models.qwen3 import Qwen3Glide

# Threads of OpenMP that wait for work spin first, by default for milliseconds, on cores that other processes need. The
# runtime reads the limit when torch loads it. 4000 turns are some 80 µs, as long as most pauses between operations.
if os.environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")):
    os.environ["GOMP_SPINCOUNT"] = "4000"

__all__ = ["LlamaGlide", "MistralGlide", "Qwen2Glide", "Qwen3Glide", "generate", "load_pair"]

# Modules of the public names.
_MODULES = {
    **{name: f"longspec.models.{family}" for family, name in FAMILIES.items()},
    "generate": "longspec.inference.generate",
    "load_pair": "longspec.inference.load_pair",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use. Importing torch takes seconds, and `longspec --help` does not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'longspec' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _generate(model: GlideMixin, *args: Any, **kwargs: Any) -> Any:
    from longspec.inference.transformers_api import generate_as_transformers  # imports torch

    return generate_as_transformers(model, *args, **kwargs)


generation.generate = _generate


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
