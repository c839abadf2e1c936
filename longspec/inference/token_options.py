"""Options of an answer, named as in transformers or else OpenAI's API: ranges of numbers, and the settings of
`Sampling` that follow from options about earlier or single tokens. Importing this module loads no library."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from numbers import Integral, Real
from typing import Any

from longspec.errors import UserError
from longspec.inference.request import ALWAYS, Rule

TOKEN_OPTIONS: dict[str, Any] = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "no_repeat_ngram_size": 0},
    **{"min_new_tokens": 0, "min_length": 0, "logit_bias": {}, "sequence_bias": {}, "bad_words_ids": []},
    **{"suppress_tokens": [], "begin_suppress_tokens": []},
}
"""The options, with the values at which they do nothing. So does None."""
NUMBERS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
"""The options that are fields of `Sampling`."""
REPETITION_RANGE = (0.01, 100.0)
"""Of repetition penalties. Logits divided by it and by the smallest temperature stay finite."""
PENALTY_RANGE = (-2.0, 2.0)
"""Of presence and frequency penalties, as in OpenAI's API."""
BIAS_RANGE = (-100.0, 100.0)
"""Of logit_bias, as in OpenAI's API, and of sequence_bias."""
MOST_NGRAM = 32
"""Largest no_repeat_ngram_size."""
MOST_RULES = 1024
"""Most banned and biased tokens and words of an answer."""
LONGEST_WORD = 17
"""Most tokens of a bad word."""
_RANGES: dict[str, tuple[type, float, float]] = {
    **{"max_new_tokens": (int, 1, ALWAYS), "min_new_tokens": (int, 0, ALWAYS), "min_length": (int, 0, ALWAYS)},
    **{"top_k": (int, 0, 2**63 - 1), "no_repeat_ngram_size": (int, 0, MOST_NGRAM)},
    **{name: (float, 0, 1) for name in ("top_p", "min_p", "typical_p", "epsilon_cutoff")},
    "repetition_penalty": (float, *REPETITION_RANGE),
    **{name: (float, *PENALTY_RANGE) for name in ("presence_penalty", "frequency_penalty")},
}
_LEFT_OUT = {"top_p": 0, "typical_p": 0, "epsilon_cutoff": 1}
"""The end of a range at which no token would be left."""

COMMAND_OPTIONS: dict[str, tuple[type, str]] = {
    "repetition_penalty": (float, "Weaken the tokens of prompt and answer by this factor; 1 does nothing."),
    "presence_penalty": (float, "Subtract this from the logits of the tokens in the answer."),
    "frequency_penalty": (float, "Subtract this for each time that the answer has the token."),
    "no_repeat_ngram_size": (int, "Ban tokens that would repeat this many tokens; 0 bans none."),
    "min_new_tokens": (int, "Ban the tokens that end an answer before this length."),
    "logit_bias": (str, 'Biases by token id, as JSON: {"13": -2.5}.'),
    "bad_words": (str, 'Texts that answers must not contain, as JSON: ["foo"].'),
}
"""The options of commands: the type of their text, and their help. `with_word_ids` replaces bad_words."""
_JSON_TYPES = {"logit_bias": dict, "bad_words": list}


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_option(name: str, value: Any) -> None:
    """Raise UserError for a number outside its range."""
    kind, least, most = _RANGES[name]
    if kind is int:
        check_integer(name, value, int(least), int(most))
    elif not is_real(value) or not least <= value <= most or value == _LEFT_OUT.get(name):
        valid = f"from {least:.4g} to {most:.4g}" + (f", but not {_LEFT_OUT[name]}" if name in _LEFT_OUT else "")
        raise UserError(f"{name}: {value!r}; it must be {valid}")


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise UserError unless `value` is an integer from `least` to `most`."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        valid = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        raise UserError(f"{name}: {value!r}; it must be {valid}")


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of COMMAND_OPTIONS that are set, from a command's options by name. Raises UserError for bad JSON."""
    given = {name: options[name] for name in COMMAND_OPTIONS if options[name] is not None}
    for name in _JSON_TYPES.keys() & given:
        try:
            value = json.loads(given[name])
        except ValueError:
            value = None
        if not isinstance(value, _JSON_TYPES[name]):
            raise UserError(f"--{name}: {given[name]!r} is no JSON {_JSON_TYPES[name].__name__}; see --help")
        given[name] = value
    return given


def with_word_ids(options: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Options with `bad_words`, texts, replaced by bad_words_ids: those of each text at the beginning of a text and
    after a space. Raises UserError for an entry that is no text, is blank, or cannot be encoded in UTF-8."""
    replaced = dict(options)
    if (words := replaced.pop("bad_words", None)) is None:
        return replaced
    ids: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str) or not word.strip() or word.encode(errors="replace").decode() != word:
            raise UserError(f"bad_words: {word!r}; give texts in UTF-8 that are not blank")
        for text in (word.lstrip(), f" {word.lstrip()}"):
            if own := tokenizer(text, add_special_tokens=False)["input_ids"]:
                ids[tuple(own)] = None
    return replaced | {"bad_words_ids": [*(replaced.get("bad_words_ids") or []), *ids]}


def token_settings(
    values: Mapping[str, Any], stop_ids: Collection[int], vocab: int, prompt_length: int = 0
) -> dict[str, Any]:
    """The fields of `Sampling` that follow from the TOKEN_OPTIONS among `values`; None is neutral. stop_ids: the tokens
    that end an answer, which min_new_tokens and min_length delay; bad words do not ban them, as in transformers.
    prompt_length: tokens that min_length counts, too. Raises UserError for a wrong value."""
    values = {name: neutral if values.get(name) is None else values[name] for name, neutral in TOKEN_OPTIONS.items()}
    for name in (*NUMBERS, "min_new_tokens", "min_length"):
        check_option(name, values[name])
    least = values["min_new_tokens"] or max(0, values["min_length"] - prompt_length)

    def check(name: str, token: Any) -> int:
        if not is_integer(token) or not 0 <= token < vocab:
            known = "" if vocab == ALWAYS else f"; the vocabulary has {vocab}"  # as before the weights are read
            raise UserError(f"{name}: {token!r} is not a token id{known}")
        return int(token)

    # Some tokenizers have more tokens than their target.
    rules = [Rule(token, -inf, until=int(least)) for token in sorted(stop_ids) if least and 0 <= token < vocab]
    rules += [Rule(check("logit_bias", token), bias) for token, bias in _biases(values["logit_bias"])]
    for name, until in (("suppress_tokens", ALWAYS), ("begin_suppress_tokens", 1)):
        rules += [Rule(check(name, token), -inf, until=until) for token in _list(name, values[name])]

    def check_word(name: str, word: Any) -> list[int]:
        ids = [check(name, token) for token in _list(name, word)]
        if not 1 <= len(ids) <= LONGEST_WORD:
            raise UserError(f"{name}: a word of {len(ids)} tokens; it must have 1 to {LONGEST_WORD}")
        return ids

    for word, bias in _sequences(values["sequence_bias"]):
        ids = check_word("sequence_bias", word)
        rules.append(Rule(ids[-1], bias, tuple(ids[:-1])))
    for word in _list("bad_words_ids", values["bad_words_ids"]):
        ids = check_word("bad_words_ids", word)
        if len(ids) > 1 or ids[0] not in stop_ids:
            rules.append(Rule(ids[-1], -inf, tuple(ids[:-1])))
    if len(rules) > MOST_RULES:
        raise UserError(f"logit_bias: {len(rules)} biases and bans in all; there may be {MOST_RULES}")
    return {name: values[name] for name in NUMBERS} | {"rules": tuple(rules)}


def _biases(value: Any) -> Iterator[tuple[Any, float]]:
    """Each token of logit_bias with its bias, unless this is 0. JSON has token ids as text."""
    if not isinstance(value, Mapping):
        raise UserError(f"logit_bias: {value!r}; give a mapping of token ids to biases")
    for token, bias in value.items():
        if not is_real(bias) or not BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]:
            raise UserError(f"logit_bias: {bias!r} for token {token}; it must be a number from -100 to 100")
        if bias:
            is_text = isinstance(token, str) and token.isdecimal() and len(token) < 10
            yield int(token) if is_text else token, float(bias)


def _sequences(value: Any) -> Iterator[tuple[Any, float]]:
    """Each word of sequence_bias with its bias: transformers has a mapping of tuples, or in files a list of pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, Sequence) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise UserError(f"sequence_bias: {value!r}; give pairs of a list of token ids and a bias")
    for word, bias in pairs:
        if not is_real(bias) or not (bias == -inf or BIAS_RANGE[0] <= bias <= BIAS_RANGE[1]):
            raise UserError(f"sequence_bias: {bias!r} for {word}; it must be a number from -100 to 100, or -inf")
        yield word, float(bias)


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"{name}: {value!r}; give a list")
    return value
