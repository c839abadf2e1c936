"""Mistral family without sliding windows: Mistral-7B v0.2 and v0.3, Mistral-Nemo, Mistral-Small."""

from transformers import MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm

from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.glide import GlideMixin


class MistralGlideDecoderLayer(GlideDecoderLayer):
    norm_class = MistralRMSNorm
    mlp_class = MistralMLP


class MistralGlide(GlideMixin, MistralForCausalLM):
    """A frozen Mistral target with its GLIDE draft."""

    target_class = MistralForCausalLM
    draft_layer_class = MistralGlideDecoderLayer
