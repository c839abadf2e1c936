"""Everything a run reads before its target is loaded, checked against one another."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hydra
from hydra.errors import InstantiationException
from torch import Tensor

from longspec.data import aligners as data_aligners
from longspec.data.aligners import Aligner
from longspec.data.collators import Collator
from longspec.data.dataset import RowDataset, build_dataset
from longspec.errors import UserError, first_line
from longspec.models.draft_files import check_draft, draft_window
from longspec.models.families import pair_class
from longspec.models.target_files import check_weights, context_window, load_tokenizer, read_config
from longspec.models.target_split import check_split
from longspec.train.config import TrainConfig

ALIGNERS = [f"{data_aligners.__name__}.{name}" for name in vars(data_aligners) if re.fullmatch("[a-z].*_aligner", name)]
"""Accepted values of `_target_` in data.aligners."""


@dataclass(frozen=True)
class Inputs:
    """`collate` makes a micro-batch of items of `rows` or `held_out`; `draft` holds the previous stage's weights."""

    rows: RowDataset
    held_out: RowDataset | None
    collate: Callable[[Sequence[Any]], dict[str, Tensor]]
    tokenizer: Any
    draft: dict[str, Tensor] | None
    window: int
    """The target's context window in tokens."""


def read_inputs(config: TrainConfig) -> Inputs:
    """Check target, tokenizer and draft, then tokenise the data (or find it in the cache). Raises UserError."""
    glide = pair_class(config.model._target_)
    aligners = [_aligner(number, entry) for number, entry in enumerate(config.data.aligners)]
    target = read_config(config.model_name_or_path)
    glide.check_family(target, config.model_name_or_path)
    if config.tp_size > 1:
        check_split(target, config.tp_size, config.model_name_or_path)
    else:
        check_weights(config.model_name_or_path)
    window = context_window(target)
    if config.data.max_length > window:
        raise UserError(
            f"config key data.max_length: {config.data.max_length} tokens do not fit the target's {window} positions"
        )
    for key, token in (("eos_token_id", config.eos_token_id), ("model.pad_token_id", config.model.pad_token_id)):
        if token is not None and not 0 <= token < target.vocab_size:
            raise UserError(f"config key {key}: {token} is none of the target's token ids, 0 … {target.vocab_size - 1}")
    tokenizer = load_tokenizer(config.model_name_or_path, target)
    draft = None
    if config.draft_model_name_or_path is not None:
        draft = check_draft(config.draft_model_name_or_path, target, glide.draft_layer_class)
        if (window_before := draft_window(config.draft_model_name_or_path)) != config.model.window:
            raise UserError(
                f"config key model.window: {config.model.window}, but the draft at {config.draft_model_name_or_path} "
                f"was trained with {window_before}; give that"
            )
    read = partial(_read_rows, config, tokenizer=tokenizer, family=target.model_type, aligners=aligners)
    rows = read(config.data.files)
    held_out = None if config.evaluation.files is None else read(config.evaluation.files)
    return Inputs(rows, held_out, _collator(config, tokenizer, target.vocab_size), tokenizer, draft, window)


def _aligner(number: int, entry: Any) -> Aligner:
    """The function that entry `number` of data.aligners makes; only those of `longspec.data.aligners` are called."""
    key = f"config key data.aligners[{number}]"
    if others := sorted(target for target in _targets(entry) if target not in ALIGNERS):
        raise UserError(f"{key}: _target_ must be one of {', '.join(ALIGNERS)}, not {others[0]!r}")
    try:
        made = hydra.utils.instantiate(entry)
    except InstantiationException as error:
        raise UserError(f"{key}: makes no aligner ({first_line(error.__cause__ or error)})") from error
    if not callable(made):
        raise UserError(f"{key}: makes no aligner; give the _target_ of a function that does, not {entry!r}")
    return made


def _targets(entry: Any) -> list[str]:
    """Every `_target_` in a configuration, at any depth: Hydra calls nested ones, too."""
    parts = list(entry.values()) if isinstance(entry, dict) else entry if isinstance(entry, list) else []
    inner = [target for part in parts for target in _targets(part)]
    return [str(entry["_target_"]), *inner] if isinstance(entry, dict) and "_target_" in entry else inner


def _read_rows(
    config: TrainConfig, files: list[str], tokenizer: Any, family: str, aligners: Sequence[Aligner]
) -> RowDataset:
    data = config.data
    return build_dataset(
        files,
        tokenizer,
        family=family,
        max_length=data.max_length,
        pack=data.pack,
        chat_format=data.chat_format,
        overflow=data.overflow,
        answer_only=data.answer_only,
        aligners=aligners,
        eos_token_id=config.eos_token_id,
        num_proc=data.num_proc,
        cache_dir=data.cache_dir,
    )


def _collator(config: TrainConfig, tokenizer: Any, vocab_size: int) -> Collator:
    wishes = (config.model.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(token for token in wishes if token is not None and token < vocab_size)  # some tokenizers' pad is not
    packed_length = config.data.max_length if config.data.pack else None
    return Collator(pad, answer_only=config.data.answer_only, pad_to=packed_length)
