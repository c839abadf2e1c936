"""`load_pair`: a target with its draft and its tokenizer, by name or by path."""

from __future__ import annotations

from typing import Any

import torch

from longspec.data.target_format import stop_tokens
from longspec.inference.device import choose_device, choose_dtype
from longspec.inference.registry import PAIRS, choose_pair
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.target_files import TemplateArguments, check_weights, generation_eos, load_tokenizer, read_config


def load_pair(
    name: str,
    draft: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    chat_template_kwargs: TemplateArguments = None,
) -> tuple[GlideMixin, Any]:
    """A pair in evaluation mode on its device, and the target's tokenizer.

    name: `smollm2-135m`, a published pair (`llama8b`, …), or any target: a folder, a hub id or a GGUF file.
    draft: a `.pth` file, a folder or a hub id; None takes the pair's own, or for other targets an untrained draft,
    with which the methods vanilla, lookup and magicdec work as usual.
    dtype: "auto" is the target's own on CUDA and float32 on a CPU. device: None is CUDA where there is one.
    chat_template_kwargs: values of the chat template's variables, such as {"enable_thinking": False} for Qwen3.
    Raises UserError.
    """
    device = choose_device(device)
    pair = choose_pair(name, None, draft) if name in PAIRS else choose_pair(None, name, draft)
    config = read_config(pair.target)
    model_class = family_class(config, pair.target)
    check_weights(pair.target)
    tokenizer = load_tokenizer(pair.target, config, chat_template_kwargs)
    ends = pair.eos_token_id
    if ends is None:
        own = stop_tokens(tokenizer, generation_eos(pair.target, config))
        ends = own[0] if len(own) == 1 else own or None
    model = model_class.from_pretrained(
        pair.target,
        glide_path=pair.draft,
        dtype=choose_dtype(dtype, config, device),
        attn_implementation=attn_implementation,
    )
    for name, ids in (("eos_token_id", ends), ("pad_token_id", pair.pad_token_id)):
        if ids is not None:
            setattr(model.generation_config, name, ids)
            setattr(model.config, name, ids)
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]
