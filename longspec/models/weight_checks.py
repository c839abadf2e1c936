"""Refuses a target whose stored weights this code would misread: quantized without a quantizer, or not of this model.

transformers casts float8 and integer matrices to the model's dtype and ignores weights that the model does not have.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from longspec.errors import UserError
from longspec.models.weight_files import cached_folder, check_start, opened, stored_weights, weight_files

FLOATING = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes that need no scale."""
SCALE_MARKS = (".weight_scale", ".scale", ".SCB", ".weight.")
"""Parts of the names of a weight's scales, after the module's name."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of scales for a float8 KV cache, which is not used here."""


def check_weights(target: str | Path, config: PreTrainedConfig, revision: str | None = None) -> None:
    """Raise UserError for a target without weights in its folder, or with weights that no quantizer interprets. Reads
    the headers of the files. Of a hub id, only files that are already in the hub's cache are read."""
    method = _quant_method(config, target)
    folder = Path(target) if Path(target).is_dir() else cached_folder(str(target), revision)
    if folder is None:
        return
    files = weight_files(folder)
    for file in files:
        check_start(file)
    kinds = _stored_kinds(files)
    # The modules whose weight has a scale, such as x of x.weight_scale_inv.
    scaled = {name.partition(mark)[0] for name in kinds for mark in SCALE_MARKS if mark in name}
    raw = [
        name
        for name, kind in kinds.items()
        # Quantized formats with other names are left to their quantizer, and so are scales.
        if kind not in FLOATING and (method is None or (name.endswith(".weight") and name[:-7] not in scaled))
    ]
    if raw:
        problem = f"no scale for method {method}" if method else "config.json names no quantization method"
        raise UserError(
            f"{target}: {_named(raw)} would be misread, stored as {kinds[raw[0]]} and {problem}; use the unquantized "
            "weights"
        )


def check_all_used(unexpected: Iterable[str], target: str | Path, config: PreTrainedConfig) -> None:
    """Raise UserError for `unexpected` weights in a target's files that the loaded model does not have. Biases of
    zeros, scales of a float8 KV cache and rotary tables, which follow from config.json, are allowed."""
    unused = sorted(name for name in unexpected if not name.endswith(CACHE_SCALES) and ".rotary_emb." not in name)
    if unused and all(name.endswith(".bias") for name in unused):
        # Some GPTQ files hold a bias of zeros for every matrix.
        stored = stored_weights(Path(target)) or {}
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
    known = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING}
    if method not in known:
        raise UserError(
            f"{target}: config.json names the quant_method {method!r}, which transformers does not know; use the "
            "unquantized weights"
        )
    return str(method)


def _stored_kinds(files: Iterable[Path]) -> dict[str, str]:
    """The dtype of each weight, one of FLOATING for a dtype that needs no scale. A file that cannot be read is left
    out; loading it reports the reason."""
    kinds: dict[str, str] = {}
    for file in files:
        with suppress(UserError), opened(file) as weights:
            kinds |= {name: _kind(weight) for name, weight in weights.items()}
    return kinds


def _kind(weight: Any) -> str:
    if not isinstance(weight, Tensor):
        return str(weight.get_dtype())
    is_float = weight.dtype.is_floating_point and weight.dtype.itemsize > 1
    return FLOATING[1] if is_float else str(weight.dtype).removeprefix("torch.")


def _named(names: list[str]) -> str:
    return f"weight {names[0]}" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
