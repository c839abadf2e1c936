"""Mistral family without sliding windows: Mistral-7B v0.2 and v0.3, Mistral-Nemo, Mistral-Small."""

from pathlib import Path

from transformers import MistralForCausalLM, PreTrainedConfig
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm

from longspec.errors import UserError
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.glide import GlideMixin


class MistralGlideDecoderLayer(GlideDecoderLayer):
    norm_class = MistralRMSNorm
    mlp_class = MistralMLP


class MistralGlide(GlideMixin, MistralForCausalLM):
    """A frozen Mistral target with its GLIDE draft."""

    target_class = MistralForCausalLM
    draft_layer_class = MistralGlideDecoderLayer

    @classmethod
    def check_family(cls, config: PreTrainedConfig, path: str | Path) -> None:
        """Raise UserError for a target that this class cannot take, such as one with a sliding window."""
        super().check_family(config, path)
        if config.sliding_window is not None:
            raise UserError(
                f"{path}: a Mistral target with sliding_window {config.sliding_window}; the draft needs full attention"
            )
