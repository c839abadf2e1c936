"""Conversion of a GGUF file into a target folder: config, safetensors and tokenizer."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from longspec.errors import UserError, first_line
from longspec.models.gguf_tokenizer import write_tokenizer

MAGIC = b"GGUF"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported values of `general.architecture`, each the name of a family. Mistral files say "llama"."""
READ = ("general.architecture", "general.type", "split.", "tokenizer.", *(f"{name}." for name in ARCHITECTURES))
"""Starts of the names of the metadata that are read. Descriptions need not be valid UTF-8."""
GGUF_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, NotImplementedError)
"""Exceptions that `gguf` and numpy raise for truncated or malformed files."""
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies. GGUF files of Llama 3.1 contain them instead of the settings below."""
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN_BETAS = ("beta_fast", "beta_slow")
"""Ends of YaRN's ramp, in turns of a frequency within the original context."""
BLOCK = 2**23
"""Number of values that are dequantized at a time."""
MAX_SHARD = "1GB"
"""Size limit of a weight file, which is in memory while it is converted. Digests of smaller files read all of them (see
`digests.WHOLE_BYTES`)."""
UNQUANTIZED = {"F32": torch.float32, "F16": torch.float16}
"""Dtypes of GGUF's types that stay."""


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file to an existing `folder`, in the form that transformers loads.

    Quantized weights become bfloat16, unquantized ones keep their type. A Mistral file becomes a Llama target, which
    computes the same. Raises UserError for a file that cannot be read, and for another architecture.
    """
    with file.open("rb") as handle:
        if handle.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{file}: not a GGUF file; give a GGUF file, a model folder or a hub id")
    from gguf import GGUFReader  # reading converted targets does not need the package

    try:
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items() if name.startswith(READ)}
        _check_whole(metadata)
        if (architecture := metadata["general.architecture"]) not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UserError(f"a GGUF file of architecture {architecture!r}; supported are {known}")
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[architecture]]
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(model_class, metadata, tensors)
        stored = _stored(model_class, config, tensors)
        write_tokenizer(folder, metadata, config.max_position_embeddings)
        config.save_pretrained(folder)
        ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
        GenerationConfig(**ids, pad_token_id=config.pad_token_id).save_pretrained(folder)
        _write_weights(folder, stored, config, f"converting {file.name}")
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except GGUF_ERRORS as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file}: this GGUF file cannot be read ({reason})") from error


def _check_whole(metadata: Mapping[str, Any]) -> None:
    """Raise UserError for a part of a split file, and for a file that is not a model."""
    if (count := int(metadata.get("split.count", 1))) > 1:
        raise UserError(
            f"part {int(metadata['split.no']) + 1} of {count} of a split GGUF file; merge them first with "
            "llama.cpp's llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    if (kind := metadata.get("general.type", "model")) != "model":
        raise UserError(f"a GGUF file of type {kind!r}; give the model, with adapters merged into it")


def _config(model_class: Any, metadata: Mapping[str, Any], tensors: dict[str, Any]) -> PreTrainedConfig:
    """transformers' config for a `model_class` target with a file's metadata."""
    prefix = f"{model_class.config_class.model_type}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if sliding := own.get("attention.sliding_window"):
        raise UserError(
            f"sliding-window attention of {sliding} tokens is not supported; the draft needs full attention"
        )

    heads, hidden = int(own["attention.head_count"]), int(own["embedding_length"])
    # An answer may end with the token of a document's end or with that of a turn's end.
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    # transformers takes one id or a list of distinct ones.
    ends = list(dict.fromkeys(number for number in ends if number is not None))
    settings: dict[str, Any] = {
        "architectures": [model_class.__name__],
        "vocab_size": len(tensors["token_embd.weight"].data),
        "hidden_size": hidden,
        "intermediate_size": int(own["feed_forward_length"]),
        "num_hidden_layers": int(own["block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(own.get("attention.head_count_kv", heads)),
        "head_dim": int(own.get("attention.key_length", hidden // heads)),
        "max_position_embeddings": int(own["context_length"]),
        # The shortest decimal for the file's fp32: 1e-05, not 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        # Quantized weights become bfloat16.
        "dtype": UNQUANTIZED.get(tensors["blk.0.attn_q.weight"].tensor_type.name, torch.bfloat16),
    }
    settings["rope_parameters"] = _rope(own, tensors, settings["head_dim"])
    if hasattr(model_class.config_class(), "attention_bias"):  # Qwen2 always has biases
        settings["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return model_class.config_class(**settings)


def _rope(own: Mapping[str, Any], tensors: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """transformers' `rope_parameters`. own: the file's metadata of the architecture. Raises UserError for a scaling
    that transformers does not have, and for heads that are rotated in part."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base", 10000.0))}
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear")  # the name before August 2023
    # As in llama.cpp, a factor without a type is of linear scaling.
    kind = own.get("rope.scaling.type", "linear" if factor else "none")
    if (rotated := int(own.get("rope.dimension_count", head_dim))) != head_dim:
        raise UserError(f"rotates {rotated} of the {head_dim} values of a head; supported are targets that rotate all")
    # llama.cpp stores Llama 3.1's scaling as divisors and no settings.
    if ROPE_FACTORS in tensors:
        rope |= _llama3_scaling(np.asarray(tensors[ROPE_FACTORS].data), rope["rope_theta"], head_dim)
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(factor or 1.0)}
        if original := own.get("rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(original)
    elif kind != "none":
        raise UserError(f"{kind} rotary scaling; supported are linear, yarn and Llama 3.1's")
    scaling = {name.removeprefix("rope.scaling."): value for name, value in own.items()}
    if rope["rope_type"] == "yarn":
        rope |= {name: float(scaling[f"yarn_{name}"]) for name in YARN_BETAS if f"yarn_{name}" in scaling}
    return rope | _magnitude(scaling, rope)


def _magnitude(scaling: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, float]:
    """transformers' factor of the rotated values, unless it is the usual one. Raises UserError for one that is not
    certain."""
    is_yarn = rope["rope_type"] == "yarn"
    usual = 1 + 0.1 * math.log(max(rope["factor"], 1.0)) if is_yarn else 1.0
    # llama.cpp's converter writes yarn_attn_factor from attention_factor, which is absolute, or else from attn_factor,
    # which transformers ignores and which is the inverse of the usual one in DeepSeek-R1-0528-Qwen3-8B.
    written = float(scaling.get("yarn_attn_factor", usual))
    if not any(math.isclose(written, known, rel_tol=1e-3) for known in (usual, 1 / usual)):
        raise UserError(
            f"rope.scaling.yarn_attn_factor {written:g}, which llama.cpp ignores and transformers may not; use the "
            "model's folder instead"
        )
    if math.isclose(relative := float(scaling.get("attn_factor", 1.0)), 1.0):
        return {}
    if not is_yarn:
        raise UserError(f"rope.scaling.attn_factor {relative:g}; supported is 1, and others with yarn")
    return {"attention_factor": usual * relative}  # as in llama.cpp


def _llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's settings, if they give these divisors [D / 2]; else raises UserError."""
    largest = float(factors.max())
    low, high, original = LLAMA3_SCALING.values()
    # Turns of each frequency theta^(-2i / D) within the original context.
    turns = original * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    # 0 for slow frequencies, which are divided by `factor`; 1 for fast ones, which stay.
    smooth = ((turns - low) / (high - low)).clip(0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
        raise UserError("unknown rotary frequency factors (not Llama 3.1's); use the model's folder instead")
    return {"rope_type": "llama3", "factor": largest, **LLAMA3_SCALING}


def _stored(model_class: Any, config: PreTrainedConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The file's tensors by transformers' names. Raises UserError unless they are exactly the model's weights."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    # Names and shapes only; nothing is allocated.
    with torch.device("meta"):
        needed = {name: tuple(weight.shape) for name, weight in model_class(config).state_dict().items()}
    # A tied head is the embedding and has no tensor of its own in the file.
    if config.tie_word_embeddings:
        del needed["lm_head.weight"]
    names = get_tensor_name_map(MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    own_names = {name: str(names.get_name(name, try_suffixes=(".weight", ".bias"))) for name in needed}
    stored = {name: tensors[own] for name, own in own_names.items() if own in tensors}
    shapes = {name: _shape(tensor) for name, tensor in stored.items()}
    unknown = tensors.keys() - {*own_names.values(), ROPE_FACTORS}
    if differing := sorted({*dict(needed.items() ^ shapes.items()), *unknown}):
        raise UserError(
            f"incomplete {config.model_type} model: {len(differing)} weights are missing, unknown or have the wrong "
            f"shape, such as {differing[0]}"
        )
    return stored


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape[::-1].tolist())  # GGUF lists the fastest dimension first


def _write_weights(folder: Path, stored: Mapping[str, Any], config: PreTrainedConfig, label: str) -> None:
    """Write GGUF tensors as safetensors of at most MAX_SHARD and their index. label: text of the progress bar."""
    dtype: Any = config.dtype
    weights = {name: torch.empty(_shape(tensor), dtype=dtype, device="meta") for name, tensor in stored.items()}
    pattern = "model{suffix}.safetensors"
    plan = split_torch_state_dict_into_shards(weights, filename_pattern=pattern, max_shard_size=MAX_SHARD)
    with tqdm(total=len(stored), desc=label, unit=" weights", delay=1) as bar:
        for file, names in plan.filename_to_tensors.items():
            shard = {}
            for name in names:
                shard[name] = _weight(name, stored[name], config)
                bar.update()
            save_file(shard, folder / file, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))


def _weight(name: str, tensor: Any, config: PreTrainedConfig) -> Tensor:
    """A dequantized weight in the target's dtype."""
    from gguf import dequantize

    data, dtype = tensor.data, config.dtype
    assert isinstance(dtype, torch.dtype)
    # llama.cpp permutes queries and keys of the Llama architecture only. Rows are quantized independently.
    if config.model_type == "llama" and ".q_proj." in name:
        data = _pair_halves(data, config.num_attention_heads)
    if config.model_type == "llama" and ".k_proj." in name:
        data = _pair_halves(data, config.num_key_value_heads)
    # GGUF stores the same order of rows as PyTorch. A block of them is in fp32 at a time.
    weight = torch.empty(_shape(tensor), dtype=dtype)
    rows = max(1, BLOCK * len(data) // tensor.n_elements)
    for start in range(0, len(data), rows):
        weight[start : start + rows] = torch.from_numpy(
            dequantize(data[start : start + rows], tensor.tensor_type).copy()
        )
    return weight


def _pair_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head: transformers rotates rows (i, i + D/2), Llama GGUF files pair (2i, 2i + 1)."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
