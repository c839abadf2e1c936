"""A frozen target with its GLIDE draft: how the pair is built, and the draft's training forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

from longspec.errors import UserError, first_line
from longspec.kernels.attention import resolve_attention
from longspec.kernels.segments import Segments
from longspec.kernels.varlen import block_attention, varlen_attention
from longspec.models.draft_files import check_draft, draft_window, fit_draft
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.parallel import (
    PretrainedModelParallelPreSplitMixin,
    gather_heads,
    join_ranks,
    model_parallel_place,
)
from longspec.models.target_attention import ATTENTION_NAME, LastLayerKV, last_keys_values, run_backbone
from longspec.models.target_files import WEIGHT_ERRORS, check_target, read_config
from longspec.models.target_graph import TargetGraphs
from longspec.models.target_split import rank_config


class Objective(Protocol):
    """What the trainer wants of a draft's forward pass."""

    @property
    def reads_target(self) -> bool:
        """Whether it needs the target's hidden states; without them the target's pass ends at its last keys."""

    def __call__(self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, lm_head: nn.Module) -> Any:
        """hidden, target_hidden [B, T, hidden] (None where not read), labels [B, T] -> whatever the trainer wants."""


def _dtype(value: str | torch.dtype) -> torch.dtype:
    dtype = value if isinstance(value, torch.dtype) else getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"torch_dtype: {value!r} is no torch dtype; use float32, float16 or bfloat16")
    return dtype


class GlideMixin(PretrainedModelParallelPreSplitMixin, PreTrainedModel):
    """Comes before the family's `…ForCausalLM`; `model` and `lm_head` are frozen, `draft_model` trains."""

    target_class: Any
    draft_layer_class: type[GlideDecoderLayer]
    gradient_checkpointing = False
    draft_is_trained = False
    """Whether the draft's weights come from training: true after a load, false for a fresh draft.

    Code that trains a fresh draft in this process sets it.
    """
    target_pass: TargetGraphs | None = None
    """What training runs instead of `run_target`."""

    def __init__(
        self,
        config: PreTrainedConfig,
        target_model_path: str | Path,
        glide_path: str | Path | None = None,
        torch_dtype: str | torch.dtype = torch.float16,
        attn_implementation: str | None = None,
    ) -> None:
        """Load the target from `target_model_path` and the draft from `glide_path`, or start a fresh draft.

        glide_path: a `.pth` file, a folder holding `draft_model_weights.pth`, or a folder or hub id in Hugging Face
        form. Raises UserError for a target of another family and for a draft that does not fit.
        """
        self.check_family(config, target_model_path)
        draft = None if glide_path is None else check_draft(glide_path, config, self.draft_layer_class)
        config = copy.deepcopy(config)
        config._attn_implementation = ATTENTION_NAME
        with torch.device("meta"):  # the target's modules replace these: nothing is allocated or initialised twice
            super().__init__(config)
        resolve_attention(attn_implementation)
        self.use_flash = (attn_implementation or "").startswith("flash")
        target = self._load_target(config, target_model_path, _dtype(torch_dtype))
        self.config, self.generation_config = target.config, target.generation_config
        self.model, self.lm_head = target.model, target.lm_head
        self.requires_grad_(False)
        self.draft_model = self.draft_layer_class(self.config)
        self.draft_model.reset_parameters(self.config.initializer_range)  # in fp32: the same draft in every dtype
        self.draft_model.to(_dtype(torch_dtype))
        if draft is not None and glide_path is not None:
            self.load_draft_state(draft, source=str(glide_path))
            self.draft_model.window = draft_window(glide_path)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        path: str | Path,
        state_dict: Mapping[str, Tensor] | None = None,
        glide_path: str | Path | None = None,
        torch_dtype: str | torch.dtype = torch.float16,
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        pad_token_id: int | None = None,
        ignore_mismatched_sizes: bool = True,
        window: int | None = None,
    ) -> GlideMixin:
        """The target at `path` (folder or hub id) with the draft in `state_dict`, at `glide_path`, or a fresh one.

        state_dict: draft weights, with or without the `draft_model.` prefix. gradient_checkpointing recomputes the
        draft layer in backward. window: of the draft's self-attention, in tokens; None takes that of the files at
        glide_path, else 512. ignore_mismatched_sizes is accepted because configs carry it; a draft that does not
        fit is a UserError all the same.
        """
        model = cls(read_config(path), path, glide_path, torch_dtype, attn_implementation)
        if state_dict is not None:
            model.load_draft_state(state_dict, source="state_dict")
        if window is not None:
            model.draft_model.window = window
        if pad_token_id is not None:
            model.config.pad_token_id = pad_token_id
        model.gradient_checkpointing = gradient_checkpointing
        return model

    @classmethod
    def check_family(cls, config: PreTrainedConfig, path: str | Path) -> None:
        """Raise UserError for a target that this class cannot take."""
        family = cls.target_class.config_class.model_type
        if config.model_type != family:
            raise UserError(f"{path}: a {config.model_type} target; {cls.__name__} takes {family} targets")
        check_target(config, path)

    def _load_target(self, config: PreTrainedConfig, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
        """The whole target, or this rank's part of it, which works together with those of the other ranks."""
        rank, world = model_parallel_place()
        target = self._read_target(config if world == 1 else rank_config(config, rank, world), path, dtype)
        if world > 1:
            join_ranks(target, config.vocab_size)
            target.config = config  # the pair's: the draft has all heads, and so has what it reads
        return target

    def _read_target(self, config: PreTrainedConfig, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
        """The weights of the target, or of this rank's part of it, in modules of `config`."""
        folder = self.shard_path(path)
        try:
            target, info = self.target_class.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True
            )
        except WEIGHT_ERRORS as error:
            raise UserError(f"{folder}: the target's weights do not load ({first_line(error)})") from error
        if absent := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
            raise UserError(f"{folder}: no whole target: {len(absent)} weights missing or misshapen, as {absent[0]}")
        return target

    def load_draft_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Put draft weights in place; UserError naming every key that is missing, unexpected or misshapen."""
        self.draft_model.load_state_dict(fit_draft(state, self.draft_model, source))
        self.draft_is_trained = True

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
        """The target's own forward; with `objective`, the draft's training forward (see `draft_forward`).

        transformers' `generate` looks the named arguments up in this signature.
        """
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

    def run_target(
        self, input_ids: Tensor, position_ids: Tensor, segments: Segments, whole: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """The target's hidden states [B, T, hidden] after its final norm, its last layer's keys and values.

        Unless `whole` the pass ends at those keys and values, and there are no hidden states.
        """
        causal = partial(self._causal, segments=segments)
        if not whole:
            return None, *last_keys_values(self.model, *self.embed(input_ids, position_ids), position_ids, causal)
        kv = LastLayerKV(self.config.num_hidden_layers)
        hidden = run_backbone(self.model, input_ids, position_ids, kv, causal)
        return hidden, kv.keys, kv.values

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, scale: float, segments: Segments) -> Tensor:
        return _on_flat(partial(varlen_attention, use_flash=self.use_flash), q, k, v, segments, scale)

    def draft_forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        objective: Objective,
        lags: Tensor | None = None,
    ) -> Any:
        """Teacher-forced draft over packed segments, and what `objective` makes of its hidden states.

        input_ids, labels, position_ids: LongTensor [B, T]; cu_seqlens: int32 [S + 1], the borders of the segments in
        the flattened B·T tokens. lags: LongTensor [S] (flash noisy training: a query sees target keys up to its own
        index minus its segment's lag), or None for GLIDE's block pattern; or [L, S] for a list of L results, one for
        each row of lags over one pass of the target. labels, cu_seqlens and lags are read on the host.
        """
        segments = Segments(cu_seqlens.tolist(), input_ids.device)
        varlen = partial(varlen_attention, use_flash=self.use_flash)
        with torch.no_grad():
            embeddings, rope = self.embed(input_ids, position_ids)
            run_target = self.target_pass or self.run_target
            target_hidden, keys, values = run_target(input_ids, position_ids, segments, objective.reads_target)
            keys, values = gather_heads(keys), gather_heads(values)
        scale = self.draft_model.self_attn.head_dim**-0.5

        def self_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _on_flat(varlen, q, k, v, segments, scale, window=self.draft_model.window)

        def cross_attend(q: Tensor, lags: Tensor | None) -> Tensor:
            if lags is None:
                return _on_flat(block_attention, q, keys, values, segments, scale)
            return _on_flat(varlen, q, keys, values, segments.lagging(lags.tolist()), scale)

        def draft(lags: Tensor | None) -> Any:
            inputs = embeddings, rope, self_attend, partial(cross_attend, lags=lags)
            if self.gradient_checkpointing:
                hidden = checkpoint(self.draft_model, *inputs, use_reentrant=False)
            else:
                hidden = self.draft_model(*inputs)
            return objective(hidden, target_hidden, labels, self.lm_head)

        return draft(lags) if lags is None or lags.dim() == 1 else [draft(row) for row in lags]


def _on_flat(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run a varlen attention, which takes flattened tokens [B·T, H, D], on [B, H, T, D] tensors."""
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return attention(*flat, *args, **kwargs).unflatten(0, (q.shape[0], -1)).transpose(1, 2)
