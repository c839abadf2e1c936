"""The import path that configs and other projects use for Qwen2 targets."""

from longspec.models.qwen2 import Qwen2Glide, Qwen2GlideDecoderLayer

__all__ = ["Qwen2Glide", "Qwen2GlideDecoderLayer"]
