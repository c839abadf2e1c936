"""Everything a run reads before its target is loaded, checked against one another."""

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hydra
from hydra.errors import InstantiationException
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.data import aligners as data_aligners
from longspec.data.aligners import Aligner
from longspec.data.collators import Collator
from longspec.data.dataset import RowDataset, build_dataset
from longspec.data.target_format import answer_end, published_target, resolve_chat_format
from longspec.errors import UserError, first_line
from longspec.models.draft_files import check_draft, draft_window
from longspec.models.families import pair_class
from longspec.models.target_files import check_weights, context_window, generation_eos, load_tokenizer, read_config
from longspec.models.target_split import check_split
from longspec.train.config import TrainConfig

logger = logging.getLogger(__name__)
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
    tokenizer = load_tokenizer(config.model_name_or_path, target, config.data.chat_template_kwargs)
    asked, name = config.data.chat_format, config.model_name_or_path
    chat_format = resolve_chat_format(asked, name, target.model_type, tokenizer, logger.info)
    eos = _eos(config, target, tokenizer, chat_format)
    pad = _pad(config, target, tokenizer)
    end = tokenizer.convert_ids_to_tokens(eos)
    logger.info("chat format %s; EOS %d (%s), padding %d", chat_format, eos, end, pad)
    config.model.draft_options.check_target(target, "config key model.kv_layers")
    draft = None
    if config.draft_model_name_or_path is not None:
        draft = check_draft(config.draft_model_name_or_path, target, glide.draft_layer_class)
        if (window_before := draft_window(config.draft_model_name_or_path)) != config.model.window:
            raise UserError(
                f"config key model.window: {config.model.window}, but the draft at {config.draft_model_name_or_path} "
                f"was trained with {window_before}; give that"
            )
    read = partial(
        _read_rows,
        config,
        tokenizer=tokenizer,
        family=target.model_type,
        chat_format=chat_format,
        eos_token_id=eos,
        aligners=aligners,
    )
    rows = read(config.data.files)
    held_out = None if config.evaluation.files is None else read(config.evaluation.files)
    packed_length = config.data.max_length if config.data.pack else None
    collate = Collator(pad, answer_only=config.data.answer_only, pad_to=packed_length)
    return Inputs(rows, held_out, collate, tokenizer, draft, window)


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


def _eos(config: TrainConfig, target: PreTrainedConfig, tokenizer: Any, chat_format: str) -> int:
    """The token that ends documents and answers: the config's, the published one, or the target's own."""
    published = published_target(config.model_name_or_path).eos_token_id
    given = published if config.eos_token_id is None else config.eos_token_id
    if given is None:
        given = answer_end(tokenizer, generation_eos(config.model_name_or_path, target), chat_format)
    if given is None:
        raise UserError(f"config key eos_token_id: {config.model_name_or_path} names no EOS token; give its id")
    _check_token("eos_token_id", given, target.vocab_size)
    return given


def _pad(config: TrainConfig, target: PreTrainedConfig, tokenizer: Any) -> int:
    """The id of padding, which is in no loss: the config's, the published one, or one that the target has."""
    if config.model.pad_token_id is not None:
        _check_token("model.pad_token_id", config.model.pad_token_id, target.vocab_size)
        return config.model.pad_token_id
    published = published_target(config.model_name_or_path).pad_token_id
    wishes = (published, tokenizer.pad_token_id, target.pad_token_id, tokenizer.eos_token_id, 0)
    # Some tokenizers' pad token is not among the embeddings.
    return next(token for token in wishes if token is not None and 0 <= token < target.vocab_size)


def _check_token(key: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise UserError(f"config key {key}: {token} is none of the target's token ids, 0 … {vocab_size - 1}")


def _read_rows(
    config: TrainConfig,
    files: list[str],
    tokenizer: Any,
    family: str,
    chat_format: str,
    eos_token_id: int,
    aligners: Sequence[Aligner],
) -> RowDataset:
    data = config.data
    return build_dataset(
        files,
        tokenizer,
        family=family,
        max_length=data.max_length,
        pack=data.pack,
        chat_format=chat_format,
        templates=data.templates,
        overflow=data.overflow,
        answer_only=data.answer_only,
        aligners=aligners,
        eos_token_id=eos_token_id,
        num_proc=data.num_proc,
        cache_dir=data.cache_dir,
    )
