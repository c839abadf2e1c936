"""Qwen3 family, dense models: Qwen3-8B, Qwen3-32B.

The target normalizes each head of its queries and keys before the rotary embedding, so the keys that the draft reads
are normalized. The draft's own queries and keys are not: every family has the same draft.
"""

from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.glide import GlideMixin


class Qwen3GlideDecoderLayer(GlideDecoderLayer):
    norm_class = Qwen3RMSNorm
    mlp_class = Qwen3MLP


class Qwen3Glide(GlideMixin, Qwen3ForCausalLM):
    """A frozen Qwen3 target with its GLIDE draft."""

    target_class = Qwen3ForCausalLM
    draft_layer_class = Qwen3GlideDecoderLayer
