"""`load_pair`: a target with its draft and its tokenizer, by name or by path."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspec.data.target_format import stop_tokens
from longspec.inference.device import choose_device, choose_dtype
from longspec.inference.pairs import Pair
from longspec.inference.process_group import on_every_rank, repeat_load
from longspec.inference.registry import choose_pair
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.parallel import model_parallel_rank_and_size, split_draft
from longspec.models.target_files import TemplateArguments, generation_eos, load_tokenizer, read_config
from longspec.models.target_split import check_shared
from longspec.models.weight_checks import check_weights


def load_pair(
    name: str | Path,
    draft: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    chat_template_kwargs: TemplateArguments = None,
) -> tuple[GlideMixin, Any]:
    """A pair in evaluation mode on its device, and the target's tokenizer.

    name: `smollm2-135m`, `qwen2.5-coder-1.5b`, a published pair such as `llama8b`, or any target: a folder, a hub id
    or a GGUF file.
    draft: a `.pth` file, a folder or a hub id. None takes the pair's own. Other targets then get an untrained draft;
    the methods vanilla, lookup and magicdec do not need a trained one.
    dtype: "auto" is the target's own on CUDA and float32 on a CPU. device: None is CUDA if there is one.
    chat_template_kwargs: values of the chat template's variables, such as {"enable_thinking": False} for Qwen3.
    Raises UserError for unknown names, files that do not load, and a draft that does not fit.
    """
    device = choose_device(device)
    named = choose_pair(str(name), None if draft is None else str(draft))
    pair, config, tokenizer = read_target(named, chat_template_kwargs)
    model = load_model(pair.target, pair.draft, choose_dtype(dtype, config, device), device)
    eos = pair.eos_token_id
    eos = eos[0] if isinstance(eos, list) and len(eos) == 1 else eos
    ids = {"eos_token_id": eos, "pad_token_id": pair.pad_token_id}
    model.set_token_ids(**{name: value for name, value in ids.items() if value is not None})
    return model, tokenizer


def read_target(pair: Pair, chat_template_kwargs: TemplateArguments) -> tuple[Pair, PreTrainedConfig, Any]:
    """The pair with its stop tokens, the target's configuration and its tokenizer. Raises UserError for misfits."""
    config = read_config(pair.target)
    family_class(config, pair.target)
    if (ranks := model_parallel_rank_and_size()[1]) == 1:
        check_weights(pair.target, config)
    else:
        check_shared(config, ranks, pair.target)
    tokenizer = load_tokenizer(pair.target, config, chat_template_kwargs)
    # Some published pairs fix the EOS that their drafts were trained with.
    if pair.eos_token_id is None:
        stop_ids = stop_tokens(tokenizer, generation_eos(pair.target, config))
        pair = replace(pair, eos_token_id=stop_ids or None)
    return pair, config, tokenizer


def load_model(target: str, draft: str | None, dtype: torch.dtype, device: torch.device) -> GlideMixin:
    """A pair in evaluation mode on its device, on each rank its part. target, draft: folders or hub ids; None is the
    draft that was saved with the target, else a fresh one, the same on all ranks. Raises UserError."""
    repeat_load(load_model, dict(locals()))

    def load() -> GlideMixin:
        model_class = family_class(read_config(target), target)
        ranks = model_parallel_rank_and_size()[1]
        if ranks > 1:
            torch.manual_seed(0)  # for a fresh draft
        model = model_class.from_pretrained(target, glide_path=draft, dtype=dtype)
        if ranks > 1:
            split_draft(model)
        return model.to(device).eval()  # type: ignore[arg-type]

    return on_every_rank(load)
