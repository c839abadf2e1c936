"""Llama family: Llama-3, Vicuna, LongChat."""

from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.glide import GlideMixin


class LlamaGlideDecoderLayer(GlideDecoderLayer):
    norm_class = LlamaRMSNorm
    mlp_class = LlamaMLP


class LlamaGlide(GlideMixin, LlamaForCausalLM):
    """A frozen Llama target with its GLIDE draft."""

    target_class = LlamaForCausalLM
    draft_layer_class = LlamaGlideDecoderLayer
