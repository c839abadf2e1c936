"""What lies in a target's folder: config, weights and tokenizer, checked before anything large is loaded."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from longspec.errors import UserError, first_line

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
HUB_ERRORS = (OSError, HFValidationError)
FILE_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError)
"""What transformers and tokenizers raise for files that are not what their names say."""
WEIGHT_ERRORS = (OSError, RuntimeError, ValueError, IndexError, EOFError, SafetensorError, UnpicklingError)
"""What torch and safetensors raise for weight files that are cut off, carry code or are something else."""
RESCALED_BY_LENGTH = ("dynamic", "longrope")


def read_config(path: str | Path) -> PreTrainedConfig:
    """The transformers config of a target folder or hub id; UserError where there is none."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path}: no model checkpoint (no config.json in this folder); give a target's folder or hub id"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except FILE_ERRORS as error:
        reason = first_line(error)
        raise UserError(f"{path}: no model checkpoint there ({reason}); give a target's folder or hub id") from error


def generation_eos(path: str | Path, config: PreTrainedConfig) -> list[int]:
    """The EOS ids of a target's generation_config.json, or of its `config` where there is no such file.

    Raises UserError for a file that does not load.
    """
    try:
        generation = GenerationConfig.from_pretrained(path)
    except FILE_ERRORS as error:
        if (Path(path) / "generation_config.json").exists():
            raise UserError(f"{path}: generation_config.json does not load ({first_line(error)})") from error
        generation = GenerationConfig.from_model_config(config)
    ids = generation.eos_token_id
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def local_target(target: str) -> Path:
    """The folder of a target; a hub id is fetched. Raises UserError."""
    if Path(target).is_dir():
        return Path(target)
    try:
        return Path(snapshot_download(target))
    except HUB_ERRORS as error:
        raise UserError(f"{target}: no such folder and no hub id ({first_line(error)})") from error


def context_window(config: PreTrainedConfig) -> int:
    """How many positions a target serves, stretched by linear or YaRN scaling of its rotary embedding.

    `max_position_embeddings` is the length before linear scaling (Vicuna-16k: 4096 × 4), and under YaRN it may be.
    """
    rope = config.rope_parameters or {}
    positions, factor = config.max_position_embeddings, rope.get("factor", 1.0)
    if rope.get("rope_type") == "linear":
        return int(positions * factor)
    if rope.get("rope_type") == "yarn":
        return max(positions, int(rope.get("original_max_position_embeddings", positions) * factor))
    return positions


def check_target(config: PreTrainedConfig, path: str | Path) -> None:
    """Raise UserError for a target whose cached keys a draft cannot share."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(f"{path}: a target with sliding-window attention layers; the draft needs full attention")
    kind = (config.rope_parameters or {}).get("rope_type")
    if kind in RESCALED_BY_LENGTH:
        # Its frequencies change with the longest position of a call, so cached keys would not fit later queries.
        raise UserError(f"{path}: a target with {kind} rotary scaling; its scaling must be fixed, as linear or yarn")


def check_weights(target: str) -> None:
    """Raise UserError for a local folder without weights; a hub id shows what it holds when it is loaded."""
    folder = Path(target)
    if not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return
    for part in folder.glob("mp_0-of-*"):
        world = part.name.rpartition("-")[2]
        raise UserError(f"{target}: a target split for {world} ranks; training takes it with tp_size={world}")
    raise UserError(f"{target}: no model checkpoint (no {' or '.join(WEIGHT_FILES)} in this folder)")


def load_tokenizer(target: str, config: PreTrainedConfig) -> Any:
    """The target's tokenizer; UserError where there is none, or where it has more tokens than the target."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except FILE_ERRORS as error:
        reason = first_line(error)
        raise UserError(f"{target}: no tokenizer that loads ({reason}); it must lie beside the weights") from error
    # Tokens added later, such as a pad token, may lie past the embeddings as long as no prompt holds them.
    vocab = tokenizer.get_vocab()
    highest = max((vocab[token] for token in vocab.keys() - tokenizer.get_added_vocab().keys()), default=-1)
    if highest >= config.vocab_size:
        raise UserError(
            f"{target}: its tokenizer has token ids up to {highest}, its model only {config.vocab_size} embeddings; "
            "this tokenizer is not the target's"
        )
    return tokenizer
