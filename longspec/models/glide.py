"""A frozen target with its draft: how the pair is built, and its pass in training."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.kernels.training.segments import Segments
from longspec.kernels.training.varlen_flash import resolve_attention, training_attention
from longspec.kernels.training.varlen_torch import TorchAttention, on_flat
from longspec.models import generation
from longspec.models.architectures import draft_class
from longspec.models.draft import Options, Reads, TargetStates, TrainingPass
from longspec.models.draft_files import DraftSettings, check_draft, draft_settings
from longspec.models.draft_layer import head_dim
from longspec.models.parallel import gather_heads
from longspec.models.pretrained import PretrainedPairMixin, copy_loading
from longspec.models.target_attention import ATTENTION_NAME, ChosenKV, LayerInputs, run_backbone
from longspec.models.target_files import checked_dtype, without_memory
from longspec.models.target_graph import TargetGraphs
from longspec.models.target_sample import take_sample, warn_if_other_target

Objective = Callable[[Tensor, Tensor, Tensor, nn.Module, nn.Module | None], Any]
"""(draft's hidden states, target's [B, T, hidden], labels [B, T], lm_head, head) -> result of a training forward pass,
such as a loss. head: the draft's own; None if it has the target's `lm_head`."""


def check_pair(model: object) -> None:
    """Raise UserError unless `model` is a pair of a target and a draft."""
    if not isinstance(model, GlideMixin):
        raise UserError(
            f"model: a {type(model).__name__}, not a pair of target and draft; load one with longspec.load_pair"
        )


class GlideMixin(PretrainedPairMixin):
    """First base of a pair class, before `…ForCausalLM`. `model` and `lm_head` are frozen, `draft_model` trains."""

    target_pass: TargetGraphs | None = None
    """Replaces `run_target` in training, if it is set."""

    def __init__(
        self,
        config: PreTrainedConfig,
        target_model_path: str | Path,
        glide_path: str | Path | None = None,
        torch_dtype: str | torch.dtype = torch.float16,
        attn_implementation: str | None = None,
        *,
        options: Options | None = None,
        **loading: Any,
    ) -> None:
        """Load the target from `target_model_path` and the draft from `glide_path`, or create a fresh draft.

        glide_path: a `.pth` file, a folder holding `draft_model_weights.pth`, or a folder or hub id in Hugging Face
        form. torch_dtype: that of the target's weights and of the draft, or "auto". options: None takes the draft's
        own, or the published ones for a fresh draft. loading: transformers' arguments revision, device_map and
        quantization_config for the target; the draft is never quantized and goes to the device of `lm_head`. Raises
        UserError for a target of another family and for a draft that does not fit.
        """
        self.check_family(config, target_model_path)
        draft, settings = None, DraftSettings()
        if glide_path is not None:
            draft, settings = check_draft(glide_path, config, self.draft_layer_class), draft_settings(glide_path)
        draft_options = options or settings.options
        draft_options.check_target(config, str(target_model_path))
        config = copy.deepcopy(config)
        config._attn_implementation = ATTENTION_NAME
        # The loaded target's modules replace those built here, so these need no memory.
        with without_memory(config):
            super().__init__(config)
        self.use_flash = resolve_attention(attn_implementation).startswith("flash")
        target = self._load_target(config, target_model_path, dtype=checked_dtype(torch_dtype), **loading)
        self.config, self.generation_config = target.config, target.generation_config
        self.model, self.lm_head = target.model, target.lm_head
        copy_loading(target, self)
        # Before the draft exists: target, embedding and head stay frozen.
        self.requires_grad_(False)

        self.draft_model = draft_class(draft_options.architecture, self.draft_layer_class)(self.config, draft_options)
        # Initialized in fp32, so that a seed gives the same fresh draft in every dtype.
        self.draft_model.reset_parameters(self.config.initializer_range)
        if draft is None:
            self.draft_model.start_from_target(target)
        # The dtype of the embeddings is that of the target, because they are never quantized.
        self.draft_model.to(device=self.lm_head.weight.device, dtype=self.model.embed_tokens.weight.dtype)
        if draft is not None:
            self.load_draft_state(draft, source=str(glide_path))
            self.draft_is_trained, self.draft_target = settings.is_trained, settings.target
            warn_if_other_target(settings.target, take_sample(self, str(target_model_path)), str(glide_path))

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Frozen embeddings [B, T, hidden] of tokens [B, T] and the target's rotary table at positions [B, T]."""
        embeddings = self.model.embed_tokens(tokens)
        return embeddings, self.model.rotary_emb(embeddings, positions)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        logits_to_keep: Any = 0,
        *,
        objective: Objective | None = None,
        **kwargs: Any,
    ) -> Any:
        """The target's own forward; with `objective`, the draft's training forward (see `draft_forward`). The named
        arguments are listed because transformers' `generate` inspects this signature."""
        if objective is not None:
            return self.draft_forward(input_ids, position_ids=position_ids, objective=objective, **kwargs)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Speculative decoding with transformers' arguments; see `transformers_api.generate_as_transformers`."""
        return generation.generate(self, *args, **kwargs)

    def run_target(
        self, input_ids: Tensor, position_ids: Tensor, segments: Segments, reads: Reads | None = None
    ) -> TargetStates:
        """The frozen target's pass in training. reads: None for those of the draft."""
        varlen = self._training_attention().varlen
        reads = reads or self.draft_model.reads

        def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return on_flat(partial(varlen, segments=segments, scale=scale), q, k, v)

        kv, states = ChosenKV(reads.kv_layers), LayerInputs(reads.layer_inputs)
        with states.recorded(self.model.layers):
            hidden = run_backbone(self.model, input_ids, position_ids, kv, causal)
        return TargetStates(hidden, list(kv.kept.values()), states.joined())

    def _training_attention(self) -> TorchAttention:
        """The attention of this pair's device and dtype."""
        # Never quantized. DeepSpeed would keep a weight gathered that is read as an attribute.
        weight = next(self.model.embed_tokens.parameters())
        return training_attention(weight.device, weight.dtype, head_dim(self.config), self.use_flash)

    def draft_forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        objective: Objective,
        lags: Tensor | None = None,
    ) -> Any:
        """Teacher-forced pass of the draft over packed segments; returns the result of `objective`.

        input_ids, labels, position_ids: LongTensor [B, T]. cu_seqlens: int32 [M + 1], the borders of M segments in the
        flattened B·T tokens. lags: LongTensor [M] for flash noisy training, where a query sees target keys up to its
        own index minus its segment's lag; None for GLIDE's block pattern; [R, M] for a list of R results from one pass
        of the target, one per row of lags. labels, cu_seqlens and lags are read on the host.
        """
        segments = Segments(cu_seqlens.tolist(), input_ids.device)
        with torch.no_grad():
            embeddings, rope = self.embed(input_ids, position_ids)
            run_target = self.target_pass or self.run_target
            target = run_target(input_ids, position_ids, segments)
            # The draft is replicated on the ranks that share a target, so each of them needs all KV heads.
            gathered = [(gather_heads(keys), gather_heads(values)) for keys, values in target.keys_values]
            target = target._replace(keys_values=gathered)
        attention = self._training_attention()
        given = TrainingPass(input_ids, position_ids, embeddings, rope, segments, attention, target)
        rows = [lags] if lags is None or lags.dim() == 1 else list(lags)
        # What the target returned is kept either way; only the draft is recomputed.
        if self.gradient_checkpointing:
            predicted = checkpoint(self.draft_model.training_forward, given, rows, use_reentrant=False)
        else:
            predicted = self.draft_model.training_forward(given, rows)
        head = self.draft_model.head
        results = [objective(hidden, target.hidden, labels, self.lm_head, head) for hidden in predicted]
        return results[0] if lags is None or lags.dim() == 1 else results
