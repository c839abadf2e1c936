"""Splits a target's weights for tensor parallelism on N ranks, one folder per rank.

Each rank gets 1/N of the query and KV heads (a group of query heads stays with its KV head), of the MLP's columns and
of the vocabulary's rows (the last rank may get fewer). All ranks get the norms. The layout is Megatron's (arXiv
1909.08053): each column-parallel product is followed by a row-parallel one, whose results are summed over the ranks.
"""

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.errors import UserError, first_line
from longspec.models.draft_layer import head_dim
from longspec.models.target_files import check_target, read_config
from longspec.models.weight_checks import check_weights
from longspec.models.weight_files import FLOATING, stored_weights
from longspec.replacing import replacing

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
WHOLE = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "rotary_emb")
WHOLE_OF_DRAFT = (
    *("post_self_attention_layernorm", "post_cross_attention_layernorm"),
    *("feature_layernorm", "feature_proj"),
)
SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Config, generation config and tokenizer in all formats."""


def rank_folder(rank: int, world: int) -> str:
    """Name of a rank's folder in the folder of a split target."""
    return f"mp_{rank}-of-{world}"


def vocabulary_rows(vocab_size: int, rank: int, world: int) -> range:
    """The tokens whose embeddings a rank holds: equal numbers of tokens, except that the last rank may have fewer."""
    # ceil(V / world), as in VocabularyHead's padding.
    most = -(-vocab_size // world)
    return range(min(rank * most, vocab_size), min((rank + 1) * most, vocab_size))


def rank_config(config: PreTrainedConfig, rank: int, world: int) -> PreTrainedConfig:
    """The config of a rank's part, which is a target with fewer heads, columns and tokens."""
    part = copy.deepcopy(config)
    # Fixed before the heads change, because its default is hidden_size / H.
    part.head_dim = head_dim(config)
    part.num_attention_heads //= world
    part.num_key_value_heads //= world
    part.intermediate_size //= world
    part.vocab_size = len(vocabulary_rows(config.vocab_size, rank, world))
    part.pad_token_id = None  # it may belong to another rank, and only a trained embedding needs it
    return part


def check_divisible(config: PreTrainedConfig, world: int, path: str | Path) -> None:
    """Raise UserError if `world` does not divide the heads or MLP columns, or exceeds the vocabulary."""
    for name in ("num_key_value_heads", "num_attention_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % world:
            raise UserError(f"{path}: {name} {size} cannot be split for {world} ranks; tp_size must divide it")
    if not vocabulary_rows(config.vocab_size, world - 1, world):
        raise UserError(f"{path}: {config.vocab_size} tokens are too few for {world} ranks; give a smaller tp_size")


def check_shared(config: PreTrainedConfig, world: int, path: str | Path) -> None:
    """Raise UserError unless `world` ranks can share the target at `path`, whole or split for this number of ranks."""
    check_divisible(config, world, path)
    if has_parts(path, world):
        for folder in (rank_folder(rank, world) for rank in range(world)):
            if not (Path(path) / folder / "config.json").is_file():
                raise UserError(f"tp_size: {path} holds no {folder}; split the target again with longspec split")
        return
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{path}: a quantized target, which cannot be split; use its unquantized weights")
    check_weights(path, config)


def has_parts(path: str | Path, world: int) -> bool:
    """Whether the folder `path` is that of a target split for `world` ranks."""
    return (Path(path) / rank_folder(0, world)).is_dir()


def is_added_once(name: str) -> bool:
    """Whether a weight is the bias of a row-parallel product: rank 0 has it, the others have zeros."""
    return name.endswith(tuple(f".{module}.bias" for module in ROW_PARALLEL))


def part_of(name: str, shape: tuple[int, ...], rank: int, world: int) -> tuple[slice, ...]:
    """The slices of the weight `name`, of a target or a draft, that a rank holds. Raises UserError for a weight that no
    supported target has, such as a quantized one."""
    *_, module, kind = name.split(".")
    # [V, hidden]: rows are tokens.
    if module in VOCABULARY and kind == "weight":
        rows = vocabulary_rows(shape[0], rank, world)
        return (slice(rows.start, rows.stop),)
    # [out, in]: a rank computes its own outputs from the whole input.
    if module in COLUMN_PARALLEL and kind in ("weight", "bias"):
        return (_share(shape[0], rank, world),)
    # [out, in]: a rank has some of the inputs and computes a term of every output.
    if module in ROW_PARALLEL and kind == "weight":
        return slice(None), _share(shape[1], rank, world)
    # Norms, and biases that are added once after the sum over ranks.
    if module in (*WHOLE, *WHOLE_OF_DRAFT) or is_added_once(name):
        return (slice(None),)
    raise UserError(f"weight {name}: not a weight of a supported target, so it cannot be split")


def _share(size: int, rank: int, world: int) -> slice:
    return slice(rank * size // world, (rank + 1) * size // world)


def split_target(source: Path, output: Path, world: int) -> None:
    """Write the target in `source` to the folder `output`: a folder per rank, and the target's config and tokenizer.
    One rank's part is in memory at a time. `output` must not exist; it appears once it is complete. Raises UserError
    for a target that cannot be split or read."""
    config = read_config(source)
    check_target(config, source)
    check_divisible(config, world, source)
    weights = stored_weights(source)
    if output.exists():
        raise UserError(f"{output}: exists already; give another folder, or remove it")

    try:
        with replacing(output, folder=True) as unfinished:
            for rank in range(world):
                folder = unfinished / rank_folder(rank, world)
                rank_config(config, rank, world).save_pretrained(folder)
                save_torch_state_dict(cut_weights(weights, rank, world), folder)
                _copy_files(source, folder, ("generation_config.json",))
            _copy_files(source, unfinished, SIDE_FILES)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{output}: cannot be written ({first_line(error)})") from error


def cut_weights(weights: Mapping[str, Any], rank: int, world: int) -> dict[str, Tensor]:
    """One rank's parts of weights, tensors or StoredWeights. The parts own their memory. Raises UserError (see
    `part_of`)."""
    parts: dict[str, Tensor] = {}
    for name, weight in weights.items():
        part = weight[part_of(name, tuple(weight.shape), rank, world)]
        if part.dtype not in FLOATING:
            raise UserError(f"weight {name}: stored as {part.dtype}; use the target's unquantized weights")
        parts[name] = part.clone(memory_format=torch.contiguous_format)  # weights of a .bin file may share storage
        if rank and is_added_once(name):
            parts[name].zero_()
    return parts


def _copy_files(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            # The parts have an index of their own.
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
