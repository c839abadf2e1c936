"""`load_pair`: a target with its draft and its tokenizer, by name or by path."""

from __future__ import annotations

from typing import Any

import torch

from longspec.errors import UserError
from longspec.inference.registry import PAIRS, choose_pair
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.models.target_files import check_weights, load_tokenizer, read_config


def load_pair(
    name: str,
    draft: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
) -> tuple[GlideMixin, Any]:
    """A pair in evaluation mode on its device, and the target's tokenizer.

    name: `smollm2-135m`, a published pair (`llama8b`, …), or any target: a folder, a hub id or a GGUF file.
    draft: a `.pth` file, a folder or a hub id; None takes the pair's own, or for other targets an untrained draft,
    with which the methods vanilla, lookup and magicdec work as usual.
    dtype: "auto" is the target's own on CUDA and float32 on a CPU. device: None is CUDA where there is one.
    Raises UserError.
    """
    device = choose_device(device)
    pair = choose_pair(name, None, draft) if name in PAIRS else choose_pair(None, name, draft)
    config = read_config(pair.target)
    model_class = family_class(config, pair.target)
    check_weights(pair.target)
    tokenizer = load_tokenizer(pair.target, config)
    if dtype == "auto":
        dtype = torch.float32 if device.type == "cpu" else config.dtype or torch.float16
    model = model_class.from_pretrained(
        pair.target, glide_path=pair.draft, torch_dtype=dtype, attn_implementation=attn_implementation
    )
    for name, number in (("eos_token_id", pair.eos_token_id), ("pad_token_id", pair.pad_token_id)):
        if number is not None:
            setattr(model.generation_config, name, number)
            setattr(model.config, name, number)
    return model.to(device).eval(), tokenizer  # type: ignore[arg-type]


def choose_device(device: str | torch.device | None) -> torch.device:
    """The CPU or a CUDA device; None is CUDA where there is one. Raises UserError for any other."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device: {device!r} is no device; use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UserError(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {device}; this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen
