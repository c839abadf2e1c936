"""Qwen2 family: QwQ-32B-Preview, Qwen2, Qwen2.5."""

from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.glide import GlideMixin


class Qwen2GlideDecoderLayer(GlideDecoderLayer):
    norm_class = Qwen2RMSNorm
    mlp_class = Qwen2MLP


class Qwen2Glide(GlideMixin, Qwen2ForCausalLM):
    """A frozen Qwen2 target with its GLIDE draft."""

    target_class = Qwen2ForCausalLM
    draft_layer_class = Qwen2GlideDecoderLayer
