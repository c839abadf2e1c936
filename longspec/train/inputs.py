"""What a run reads before it loads the target, checked for consistency, and the vocabulary list of a fresh draft."""

import logging
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from longspec.data import aligners as data_aligners
from longspec.data.aligners import Aligner
from longspec.data.collators import Collator
from longspec.data.dataset import RowDataset, build_dataset
from longspec.data.target_format import OWN_IDS, PUBLISHED_TARGETS, answer_end, resolve_chat_format
from longspec.data.tokenization import Tokenize
from longspec.errors import UserError
from longspec.models.draft_files import check_draft
from longspec.models.draft_layer import GLIDE
from longspec.models.draft_vocabulary import most_frequent
from longspec.models.families import pair_class
from longspec.models.target_files import generation_eos, load_tokenizer, position_limit, read_config
from longspec.models.target_split import check_shared, vocabulary_rows
from longspec.models.weight_checks import check_weights
from longspec.train.config_schema import TrainConfig

logger = logging.getLogger(__name__)
ALIGNERS = [f"{data_aligners.__name__}.{name}" for name in vars(data_aligners) if re.fullmatch("[a-z].*_aligner", name)]
"""Accepted values of `_target_` in data.aligners."""


@dataclass(frozen=True)
class Inputs:
    """The data, tokenizer and draft of a run."""

    rows: RowDataset
    held_out: RowDataset | None
    collate: Collator
    """Function from items of `rows` to a micro-batch."""
    tokenizer: Any
    draft: dict[str, Tensor] | None
    """Draft weights of the previous stage; None for a fresh draft."""
    max_positions: int
    """The target's context length in tokens."""

    @property
    def collate_held_out(self) -> Collator:
        """`collate` for items of `held_out`. Prompts have no labels: the draft never proposes their tokens."""
        return replace(self.collate, answer_only=True)


def read_inputs(config: TrainConfig) -> Inputs:
    """Check target, tokenizer and draft, then tokenize the data or find it in the cache. Raises UserError."""
    # Everything is checked before the data is tokenized, which can take hours.
    target, tokenize, pad, draft = read_pair(config)
    data = config.data
    read_rows = partial(
        build_dataset, tokenize=tokenize, pack=data.pack, num_proc=data.num_proc, cache_dir=data.cache_dir
    )
    rows = read_rows(data.files)
    held_out = None if config.evaluation.files is None else read_rows(config.evaluation.files)
    # All packed rows have the same length, so that the shapes of micro-batches repeat.
    packed_length = data.max_length if data.pack else None
    collate = Collator(pad, answer_only=data.answer_only, pad_to=packed_length)
    return Inputs(rows, held_out, collate, tokenize.tokenizer, draft, position_limit(target))


def read_pair(config: TrainConfig) -> tuple[PreTrainedConfig, Tokenize, int, dict[str, Tensor] | None]:
    """The target's config, the tokenization of records for it, the padding token, and the draft's weights or None. The
    target's weights are not read. Raises UserError for a target or draft that training cannot start from."""
    name = config.model_name_or_path
    glide = pair_class(config.model._target_)
    aligners = tuple(_make_aligner(number, entry) for number, entry in enumerate(config.data.aligners))
    target = read_config(name)
    glide.check_family(target, name)
    if config.tp_size > 1:
        check_shared(target, config.tp_size, name)
    else:
        check_weights(name, target)
    check_fit(config, target)

    tokenizer = load_tokenizer(name, target, config.data.chat_template_kwargs)
    chat_format = resolve_chat_format(config.data.chat_format, name, target.model_type, tokenizer, logger.info)
    eos, pad = _special_tokens(config, target, tokenizer, chat_format)
    eos_text = tokenizer.convert_ids_to_tokens(eos)
    logger.info("chat format %s; EOS %d (%s), padding %d", chat_format, eos, eos_text, pad)

    path = config.draft_model_name_or_path  # None for a fresh draft
    draft = None if path is None else check_draft(path, target, glide.draft_layer_class)
    data = config.data
    tokenize = Tokenize(
        tokenizer=tokenizer,
        eos_token_id=eos,
        vocab_size=target.vocab_size,
        family=target.model_type,
        chat_format=chat_format,
        max_length=data.max_length,
        overflow=data.overflow,
        answer_only=data.answer_only,
        aligners=aligners,
        templates=data.templates,
    )
    return target, tokenize, pad, draft


def check_fit(config: TrainConfig, target: PreTrainedConfig) -> None:
    """Raise UserError unless the rows and the draft's options fit the target."""
    if config.data.max_length > (positions := position_limit(target)):
        raise UserError(
            f"config key data.max_length: {config.data.max_length} tokens do not fit the target's {positions} positions"
        )
    options = config.model.draft_options
    source = f"config key model.{'kv_layers' if options.architecture == GLIDE else 'architecture_options'}"
    options.check_target(target, source)
    if config.draft_model_name_or_path is None:
        options.check_fresh(target, source)
    if (size := config.model.draft_vocabulary) is not None and size >= target.vocab_size:
        raise UserError(
            f"config key model.draft_vocabulary: {size}, but the target has only {target.vocab_size} tokens; use "
            "fewer, or null for all"
        )


def _make_aligner(number: int, entry: Any) -> Aligner:
    """The aligner of entry `number` of data.aligners. Only functions of `longspec.data.aligners` are called."""
    key = f"config key data.aligners[{number}]"
    function = entry.get("_target_") if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or function not in ALIGNERS:
        raise UserError(f"{key}: must have one of {', '.join(ALIGNERS)} as _target_, not {function!r}")
    arguments = {name: value for name, value in entry.items() if name != "_target_"}
    try:
        return getattr(data_aligners, function.rpartition(".")[2])(**arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key}: cannot make an aligner ({error})") from error


def _special_tokens(config: TrainConfig, target: PreTrainedConfig, tokenizer: Any, chat_format: str) -> tuple[int, int]:
    """The tokens of EOS and padding: configured, published, or the target's own. Raises UserError."""
    name, own_pad = config.model_name_or_path, config.model.pad_token_id
    eos, pad = PUBLISHED_TARGETS.get(name, OWN_IDS)
    if config.eos_token_id is not None:
        eos = config.eos_token_id
    elif eos is None:
        eos = answer_end(tokenizer, generation_eos(name, target), chat_format)
    if eos is None:
        raise UserError(f"config key eos_token_id: {name} has no EOS token; give its id")

    ids = range(target.vocab_size)
    for key, token in (("eos_token_id", eos), ("model.pad_token_id", own_pad)):
        # An id outside the vocabulary would end the first step with an indexing error.
        if token is not None and token not in ids:
            raise UserError(f"config key {key}: {token} is not a token id of the target; use one of 0 … {ids[-1]}")
    # The pad token of some tokenizers has no embedding.
    pads = (own_pad, pad, tokenizer.pad_token_id, target.pad_token_id, tokenizer.eos_token_id, 0)
    return eos, next(token for token in pads if token is not None and token in ids)


def fresh_vocabulary(config: TrainConfig, inputs: Inputs) -> Tensor | None:
    """The `model.draft_vocabulary` most frequent tokens of the training data, LongTensor [Vd], ascending.

    EOS and the tokenizer's added and special tokens are preferred, if they occur. None without the key. config: that of
    this machine, which names the target's folder.
    """
    if (size := config.model.draft_vocabulary) is None:
        return None
    tokenizer = inputs.tokenizer
    always = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if config.eos_token_id is not None:
        always.add(config.eos_token_id)
    counts = token_counts(inputs.rows, read_config(config.model_name_or_path).vocab_size)
    tokens = most_frequent(counts, size, always)
    covered = 100 * counts[tokens].sum() / counts.sum()
    logger.info("draft vocabulary: %d tokens, %.2f%% of those in the training data", size, covered)
    return tokens


def token_counts(rows: RowDataset, vocab_size: int) -> Tensor:
    """How often each token occurs in the samples of `rows`, LongTensor [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    # Chunk by chunk, because the samples stay in a memory-mapped table.
    for samples in rows.samples.data.column("input_ids").chunks:
        counts += np.bincount(samples.flatten().to_numpy(), minlength=vocab_size)
    return torch.from_numpy(counts)


def check_list_split(tokens: Tensor, vocab_size: int, tp_size: int) -> None:
    """Raise UserError unless each rank that shares a target has rows of the list `tokens`, LongTensor [Vd]."""
    for rank in range(tp_size):
        rows = vocabulary_rows(vocab_size, rank, tp_size)
        if not ((tokens >= rows.start) & (tokens < rows.stop)).any():
            raise UserError(
                f"config key tp_size: {tp_size}; the draft's vocabulary of {len(tokens)} tokens has none of rank "
                f"{rank}'s, {rows.start} … {rows.stop - 1}; use a smaller tp_size or a larger vocabulary"
            )
