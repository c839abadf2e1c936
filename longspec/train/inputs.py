"""Everything a run reads before its target is loaded, checked against one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from torch import Tensor

from longspec.data.collators import Collator
from longspec.data.dataset import RowDataset, build_dataset
from longspec.errors import UserError
from longspec.models.draft_files import check_draft
from longspec.models.target_files import check_weights, context_window, load_tokenizer, read_config
from longspec.train.config import TrainConfig


@dataclass(frozen=True)
class Inputs:
    """`collate` makes a micro-batch of items of `rows`; `draft` holds the previous stage's weights, if any."""

    rows: RowDataset
    collate: Callable[[Sequence[Any]], dict[str, Tensor]]
    tokenizer: Any
    draft: dict[str, Tensor] | None
    window: int
    """The target's context window in tokens."""


def read_inputs(config: TrainConfig) -> Inputs:
    """Check target, tokenizer and draft, then tokenise the data (or find it in the cache). Raises UserError."""
    glide: Any = hydra.utils.get_class(config.model._target_.rpartition(".")[0])
    target = read_config(config.model_name_or_path)
    glide._check_family(target, config.model_name_or_path)
    check_weights(config.model_name_or_path)
    window = context_window(target)
    if config.data.max_length > window:
        raise UserError(
            f"config key data.max_length: {config.data.max_length} tokens do not fit the target's {window} positions"
        )
    tokenizer = load_tokenizer(config.model_name_or_path, target)
    draft = None
    if config.draft_model_name_or_path is not None:
        draft = check_draft(config.draft_model_name_or_path, target, glide.draft_layer_class)
    rows = _read_rows(config, tokenizer, target.model_type)
    return Inputs(rows, _collator(config, tokenizer, target.vocab_size), tokenizer, draft, window)


def _read_rows(config: TrainConfig, tokenizer: Any, family: str) -> RowDataset:
    data = config.data
    return build_dataset(
        data.files,
        tokenizer,
        family=family,
        max_length=data.max_length,
        pack=data.pack,
        chat_format=data.chat_format,
        overflow=data.overflow,
        answer_only=data.answer_only,
        aligners=[hydra.utils.instantiate(aligner) for aligner in data.aligners],
        eos_token_id=config.eos_token_id,
        num_proc=data.num_proc,
        seed=config.seed,
        cache_dir=data.cache_dir,
    )


def _collator(config: TrainConfig, tokenizer: Any, vocab_size: int) -> Collator:
    wishes = (config.model.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in wishes if token is not None and token < vocab_size)  # some tokenizers' pad is not
    packed_length = config.data.max_length if config.data.pack else None
    return Collator(pad, answer_only=config.data.answer_only, pad_to=packed_length)
