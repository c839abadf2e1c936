"""What lies in a target's folder: config, weights and tokenizer, checked before anything large is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from longspec.errors import UserError

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
HUB_ERRORS = (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError)


def read_config(path: str | Path) -> PreTrainedConfig:
    """The transformers config of a target folder or hub id; UserError where there is none."""
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path}: no model checkpoint (no config.json in this folder); give a target's folder or hub id"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except (*HUB_ERRORS, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path}: no model checkpoint there ({reason}); give a target's folder or hub id") from error


def context_window(config: PreTrainedConfig) -> int:
    """How many positions a target serves.

    Linear and dynamic rotary scaling stretch `max_position_embeddings`, which then names the length before
    scaling (Vicuna-16k: 4096 × 4); the other kinds of scaling already count in it.
    """
    rope = config.rope_parameters or {}
    stretched = rope.get("rope_type") in ("linear", "dynamic")
    return int(config.max_position_embeddings * (rope.get("factor", 1.0) if stretched else 1))


def check_weights(target: str) -> None:
    """Raise UserError for a local folder without weights; a hub id shows what it holds when it is loaded."""
    folder = Path(target)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        raise UserError(f"{target}: no model checkpoint (no {' or '.join(WEIGHT_FILES)} in this folder)")


def load_tokenizer(target: str, config: PreTrainedConfig) -> Any:
    """The target's tokenizer; UserError where there is none, or where it has more tokens than the target."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
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
