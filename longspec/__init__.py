"""LongSpec: lossless speculative decoding for long contexts."""

from longspec.inference import transformers_api  # noqa: F401  (binds `generate` to the models)
from longspec.inference.generate import generate
from longspec.inference.load_pair import load_pair
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide

__all__ = ["LlamaGlide", "Qwen2Glide", "generate", "load_pair"]
