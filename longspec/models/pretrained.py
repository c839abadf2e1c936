"""Loading and saving a pair, with the conventions of transformers' `from_pretrained` and `save_pretrained`."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from longspec.errors import UserError
from longspec.models.draft import Draft
from longspec.models.draft_files import (
    DRAFT_FOLDER,
    asked_options,
    check_finite,
    draft_of_pair,
    fit_draft,
    stated_options,
)
from longspec.models.draft_layer import GlideDecoderLayer
from longspec.models.draft_saving import save_draft_folder
from longspec.models.draft_vocabulary import checked_tokens, listed_tokens
from longspec.models.parallel import PretrainedModelParallelPreSplitMixin, join_ranks, model_parallel_rank_and_size
from longspec.models.target_files import check_no_adapter, check_target, local_target, read_config
from longspec.models.target_sample import TargetSample, take_sample
from longspec.models.target_split import cut_weights, has_parts, rank_config
from longspec.models.weight_checks import check_all_used, check_weights
from longspec.models.weight_files import stored_weights, weight_errors, without_bar

LOADED_WITH = (
    *("hf_device_map", "hf_quantizer", "is_quantized", "quantization_method"),
    *("is_loaded_in_4bit", "is_loaded_in_8bit"),
)
"""Attributes that transformers' `from_pretrained` sets on a model for its `to` and `save_pretrained`."""


def copy_loading(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the attributes LOADED_WITH, without which a quantized or placed target cannot be moved or saved."""
    for name in LOADED_WITH:
        if hasattr(source, name):
            setattr(model, name, getattr(source, name))


class PretrainedPairMixin(PretrainedModelParallelPreSplitMixin, PreTrainedModel):
    """Loads and saves pairs."""

    target_class: Any
    draft_layer_class: type[GlideDecoderLayer]
    draft_model: Draft
    gradient_checkpointing = False
    draft_is_trained = False
    """Whether the draft is a loaded one. Code that trains a fresh draft in this process sets it."""
    draft_target: TargetSample | None = None
    """Sample of the target that the draft was trained for; None if the draft does not say."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        path: str | Path,
        state_dict: Mapping[str, Tensor] | None = None,
        glide_path: str | Path | None = None,
        torch_dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        gradient_checkpointing: bool = False,
        pad_token_id: int | None = None,
        ignore_mismatched_sizes: bool = True,
        window: int | None = None,
        *,
        kv_layers: Sequence[int] | None = None,
        target_feature: bool | None = None,
        mlp_size: int | None = None,
        draft_vocabulary: Sequence[int] | None = None,
        architecture: str | None = None,
        architecture_options: Mapping[str, Any] | None = None,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        device_map: Any = None,
        quantization_config: Any = None,
    ) -> Self:
        """The target at `path` (folder or hub id), in eval mode, with a draft.

        The draft is the one in `state_dict` (with or without the `draft_model.` prefix), else the one at `glide_path`,
        else the one that `save_pretrained` wrote next to the target, else a fresh one (see `draft_is_trained`).

        dtype (or torch_dtype): a floating-point dtype, or "auto" (the default), that of the target's files.
        revision, device_map, quantization_config: as in transformers, for the target; one device for the whole target.
        gradient_checkpointing recomputes the draft layer in backward. window, kv_layers, target_feature, mlp_size: see
        `DraftOptions`; None is the saved draft's own value, else the published one. architecture, architecture_options:
        see docs/own-draft.md. ignore_mismatched_sizes has no effect; published configs contain it. draft_vocabulary:
        the token ids that a fresh draft proposes, None for all.
        Raises UserError, also for a draft that does not fit.
        """
        given: dict[str, Any] = {"window": window, "kv_layers": kv_layers, "target_feature": target_feature}
        given |= {"mlp_size": mlp_size, "architecture": architecture, **(architecture_options or {})}
        # The metadata of a state dict that torch.load read from a draft's .pth file.
        asked = stated_options(getattr(state_dict, "_metadata", {}).get("", {}))
        asked |= {name: value for name, value in given.items() if value is not None}

        config = read_config(path, revision)
        if state_dict is None and glide_path is None:
            glide_path = draft_of_pair(path, revision)
        vocabulary = None
        if draft_vocabulary is not None:
            if state_dict is not None or glide_path is not None:
                raise UserError("draft_vocabulary: for a fresh draft; a saved draft has its own list")
            vocabulary = checked_tokens(draft_vocabulary, config.vocab_size)

        # transformers renamed torch_dtype to dtype; both are accepted.
        dtype = dtype or torch_dtype or "auto"
        loading = {"revision": revision, "device_map": device_map, "quantization_config": quantization_config}
        options = asked_options(asked, glide_path)
        model = cls(config, path, glide_path, dtype, attn_implementation, options=options, **loading)
        if vocabulary is not None:
            model.draft_model.set_vocabulary(vocabulary)
        if state_dict is not None:
            model.load_draft_state(state_dict, source="state_dict")
        if pad_token_id is not None:
            model.set_token_ids(pad_token_id=pad_token_id)
        model.gradient_checkpointing = gradient_checkpointing
        return model.eval()

    def set_token_ids(self, **ids: int | list[int]) -> None:
        """Set eos_token_id or pad_token_id in the config and the generation config."""
        generation: Any = self.generation_config
        # transformers saves a published config as it is, but refuses to save contradictory settings, such as a
        # temperature without do_sample, in a config that was changed since it was loaded.
        is_published = getattr(generation, "_original_object_hash", None) == hash(generation)
        for name, value in ids.items():
            setattr(self.config, name, value)
            setattr(generation, name, value)
        if is_published:
            generation._original_object_hash = hash(generation)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Save the target as transformers does and the draft, with its options, in the subfolder `draft`.

        `from_pretrained` of the folder loads the pair; for transformers it is an ordinary target. Other arguments are
        those of transformers' `save_pretrained`. Raises UserError on a rank that has only a part of the target, and for
        arguments that would lose the draft.
        """
        if model_parallel_rank_and_size()[1] > 1:
            raise UserError("save_pretrained: this rank has only a part of the target; save in a single process")
        if kwargs.get("push_to_hub") or kwargs.get("state_dict"):
            raise UserError("save_pretrained: takes neither push_to_hub nor state_dict; call push_to_hub() instead")
        # An ordinary transformers model that shares the target's modules. Those that are replaced take no memory.
        with torch.device("meta"):
            alone = self.target_class(copy.deepcopy(self.config))
        alone.model, alone.lm_head, alone.generation_config = self.model, self.lm_head, self.generation_config
        copy_loading(self, alone)
        alone.save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            draft, options = self.draft_model.state_dict(), self.draft_model.options
            sample = self.draft_target or take_sample(self, str(self.config.name_or_path))
            folder = Path(save_directory, DRAFT_FOLDER)
            save_draft_folder(draft, self.config, folder, options, self.draft_is_trained, sample)

    @classmethod
    def check_family(cls, config: PreTrainedConfig, path: str | Path) -> None:
        """Raise UserError for a target that this class does not support."""
        family = cls.target_class.config_class.model_type
        if config.model_type != family:
            raise UserError(f"{path}: a {config.model_type} target; {cls.__name__} takes {family} targets")
        check_target(config, path)

    def _load_target(self, config: PreTrainedConfig, path: str | Path, **options: Any) -> PreTrainedModel:
        """The target, or with tensor parallelism this rank's part, connected with those of the other ranks."""
        rank, world = model_parallel_rank_and_size()
        target = self._read_target(config if world == 1 else rank_config(config, rank, world), path, options)
        if world > 1:
            join_ranks(target, config.vocab_size)
            target.config = config  # of the whole target: the draft and the keys that it reads have all heads
        return target

    def _read_target(self, config: PreTrainedConfig, path: str | Path, options: dict[str, Any]) -> PreTrainedModel:
        """The weights of the target, or of this rank's part of it, in modules of `config`."""
        folder = local_target(self.shard_path(path), options.pop("revision", None))
        rank, world = model_parallel_rank_and_size()
        check_no_adapter(folder)
        check_weights(folder, config)
        if world > 1 and not has_parts(path, world):  # only this rank's part of each weight is read
            options["state_dict"] = cut_weights(stored_weights(folder), rank, world)
        elif (
            options["dtype"] not in ("auto", config.dtype)
            and options.get("quantization_config") is None
            and not hasattr(config, "quantization_config")
            and not is_deepspeed_zero3_enabled()
        ):
            # The weights are cast: transformers would keep whole files in memory, next to those of another dtype.
            options["state_dict"] = stored_weights(folder)
        has_weights = options.get("state_dict") is not None
        # With ignore_mismatched_sizes, wrong shapes are reported and refused below.
        options |= {"config": config, "output_loading_info": True, "ignore_mismatched_sizes": True}
        options["trust_remote_code"] = False
        with weight_errors(f"{folder}: the target's weights do not load"), without_bar():
            target, info = self.target_class.from_pretrained(None if has_weights else folder, **options)
            target.config.name_or_path = target.name_or_path = str(path)
            if has_weights and (folder / "generation_config.json").is_file():
                target.generation_config = GenerationConfig.from_pretrained(folder)
        # transformers initializes missing weights at random and only warns.
        if absent := sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])]):
            raise UserError(
                f"{folder}: incomplete target: {len(absent)} weights are missing or have the wrong shape, such as "
                f"{absent[0]}"
            )
        check_all_used(info["unexpected_keys"], folder, config)
        # The draft, its cache and the target's last layer exchange tensors in every round.
        if len(devices := sorted({str(p.device) for p in target.parameters()})) > 1:
            raise UserError(
                f"device_map: places the target on {', '.join(devices)}; use a single device, such as cuda:0"
            )
        return target

    def load_draft_state(self, state: Mapping[str, Tensor], source: str) -> None:
        """Load trained draft weights. Raises UserError that names missing, unexpected, wrongly shaped and non-finite
        weights."""
        weights = fit_draft(state, self.draft_model, source)
        tokens = listed_tokens(weights["d2t"]) if "d2t" in weights else None
        self.draft_model.load(weights, tokens, self)
        # A finite fp32 weight can overflow when it is cast to fp16.
        check_finite(self.draft_model.state_dict(), f"{source}, in {next(self.draft_model.parameters()).dtype}")
        self.draft_is_trained = True
