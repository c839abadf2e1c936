"""The import path that configs and other projects use for Llama targets."""

from longspec.models.llama import LlamaGlide, LlamaGlideDecoderLayer

__all__ = ["LlamaGlide", "LlamaGlideDecoderLayer"]
