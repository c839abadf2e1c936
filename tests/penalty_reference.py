"""References of sampling: penalties one text at a time, warpers of transformers, and samplers of equal rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pairs import tiny_config
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from longspec.inference.request import FILTERS, Sampling
from longspec.inference.row_settings import RowSettings
from longspec.inference.sampling import Sampler, sampling_kind
from longspec.kernels.choice import backend_of


def processed(
    ids: Tensor, logits: Tensor, prompt_length: int, options: Mapping[str, Any], eos: Sequence[int] = ()
) -> Tensor:
    """The logits [B, V] of the tokens after ids [B, P], whose first `prompt_length` are the prompt, under options."""
    processors = LogitsProcessorList()
    if "logit_bias" in options:
        biases = {(int(token),): float(bias) for token, bias in options["logit_bias"].items()}
        processors.append(SequenceBiasLogitsProcessor(biases))
    if "sequence_bias" in options:
        processors.append(SequenceBiasLogitsProcessor(options["sequence_bias"]))
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    logits = processors(ids, logits)

    answer = torch.nn.functional.one_hot(ids[:, prompt_length:], logits.shape[1]).sum(1)
    logits = logits - options.get("presence_penalty", 0) * (answer > 0) - options.get("frequency_penalty", 0) * answer

    bans = LogitsProcessorList()
    if "no_repeat_ngram_size" in options:
        bans.append(NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if "bad_words_ids" in options:
        bans.append(NoBadWordsLogitsProcessor(options["bad_words_ids"], list(eos) or None))
    if "min_new_tokens" in options:
        bans.append(MinNewTokensLengthLogitsProcessor(prompt_length, options["min_new_tokens"], list(eos)))
    if "min_length" in options:
        bans.append(MinLengthLogitsProcessor(options["min_length"], list(eos)))
    if "begin_suppress_tokens" in options:
        bans.append(SuppressTokensAtBeginLogitsProcessor(options["begin_suppress_tokens"], prompt_length))
    if "suppress_tokens" in options:
        bans.append(SuppressTokensLogitsProcessor(options["suppress_tokens"]))
    return bans(ids, logits)


def greedy(model: Any, prompt: Sequence[int], count: int, options: Mapping[str, Any], eos: Sequence[int]) -> list[int]:
    """The target's greedy answer of at most `count` tokens, token by token without a cache."""
    ids = torch.tensor([prompt])
    while ids.shape[1] < len(prompt) + count:
        with torch.no_grad():
            logits = model(ids).logits[:, -1]
        token = processed(ids, logits, len(prompt), options, eos).argmax(-1)
        ids = torch.cat([ids, token[:, None]], 1)
        if int(token) in eos:
            break
    return ids[0, len(prompt) :].tolist()


def sampler(temperature: float, rows: int, seed: int = 0, **settings: float) -> Sampler:
    """A sampler of `rows` rows with the seeds seed, seed + 1, ..., for verification."""
    sampling = Sampling(temperature, **settings)  # type: ignore[arg-type]
    own = RowSettings.allocate(rows, torch.device("cpu"))
    own.assign(slice(0, rows), [sampling] * rows, range(seed, seed + rows))
    made = Sampler(sampling_kind([sampling]), own)
    made.backend = backend_of(torch.device("cpu"), torch.float32)
    return made


_MODEL: Any = LlamaForCausalLM(tiny_config("llama"))


def transformers_warpers(temperature: float, options: Mapping[str, Any]) -> LogitsProcessorList:
    """Those of the filters that are set, as transformers itself orders them; other options are left out."""
    filters = {name: options.get(name, neutral) for name, neutral in FILTERS.items()}
    return _MODEL._get_logits_processor(GenerationConfig(do_sample=True, temperature=temperature, **filters))
