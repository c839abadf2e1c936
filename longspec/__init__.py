"""LongSpec: lossless speculative decoding for long contexts.

The public names are loaded at first use, so that importing the package loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspec.inference.generate import generate
    from longspec.inference.load_pair import load_pair
    from longspec.inference.transformers_api import generate_as_transformers as generate_as_transformers
    from longspec.models.llama import LlamaGlide
    from longspec.models.qwen2 import Qwen2Glide

__version__ = "0.1.0"

__all__ = ["LlamaGlide", "Qwen2Glide", "generate", "load_pair"]

_MODULES = {
    "LlamaGlide": "longspec.models.llama",
    "Qwen2Glide": "longspec.models.qwen2",
    "generate": "longspec.inference.generate",
    "generate_as_transformers": "longspec.inference.transformers_api",
    "load_pair": "longspec.inference.load_pair",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
