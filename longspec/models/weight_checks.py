"""Refuses a target whose stored weights this code would misread: quantized without a quantizer, or not of this model.

transformers casts float8 and integer matrices to the model's dtype and ignores weights that the model does not have.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from longspec.errors import UserError
from longspec.models.weight_files import FLOATING, check_start, stored_weights, weight_files

DTYPES = {*FLOATING, "F64", "F32", "F16", "BF16"}
"""The dtypes that need no scale, also by safetensors' names."""
SCALE_MARKS = (".weight_scale", ".scale", ".SCB", ".weight.")
"""Parts of the names of a weight's scales, after the module's name."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of scales for a float8 KV cache, which is not used here."""


def check_weights(target: str | Path, config: PreTrainedConfig) -> None:
    """Raise UserError for a target's folder without weights, or with weights that no quantizer interprets. Reads the
    headers of the files. A hub id is checked once it is fetched."""
    if not Path(target).is_dir():
        return
    for file in weight_files(Path(target)):
        check_start(file)
    dtypes: dict[str, str | torch.dtype] = {}
    with suppress(UserError):  # loading reports what cannot be read
        dtypes = {name: weight.dtype for name, weight in stored_weights(Path(target)).items()}
    raw = [name for name, dtype in dtypes.items() if dtype not in DTYPES]
    problem = "config.json names no quantization method"
    if method := _quant_method(config, target):
        # Quantized formats with other names are left to their quantizer, and so are scales.
        scaled = {name.partition(mark)[0] for name in dtypes for mark in SCALE_MARKS if mark in name}
        raw = [name for name in raw if name.endswith(".weight") and name.removesuffix(".weight") not in scaled]
        problem = f"no scale for method {method}"
    if raw:
        raise UserError(
            f"{target}: {_named(raw)} would be misread, stored as {dtypes[raw[0]]} and {problem}; use the unquantized "
            "weights"
        )


def check_all_used(unexpected: Iterable[str], target: Path, config: PreTrainedConfig) -> None:
    """Raise UserError for `unexpected` weights in a target's files that the loaded model does not have. Biases of
    zeros, scales of a float8 KV cache and rotary tables, which follow from config.json, are allowed."""
    unused = sorted(name for name in unexpected if not name.endswith(CACHE_SCALES) and ".rotary_emb." not in name)
    if unused and all(name.endswith(".bias") for name in unused):
        # Some GPTQ files hold a bias of zeros for every matrix.
        stored = stored_weights(target)
        unused = [name for name in unused if name not in stored or stored[name][:].any()]
    if unused:
        raise UserError(
            f"{target}: {_named(unused)} would be ignored, because a {config.model_type} target with this config.json "
            "does not have it; use weights and config.json that belong together"
        )


def _quant_method(config: PreTrainedConfig, target: str | Path) -> str | None:
    """The quantization method that config.json names, None for unquantized weights. Raises UserError if unknown."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    if method not in AUTO_QUANTIZER_MAPPING:
        raise UserError(
            f"{target}: config.json names the quant_method {method!r}, which transformers does not know; use the "
            "unquantized weights"
        )
    return str(method)


def _named(names: list[str]) -> str:
    return f"weight {names[0]}" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
