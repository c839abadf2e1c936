"""The tokenizer described by a GGUF file's metadata, in the files that transformers' AutoTokenizer loads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from longspec.chat_template import DEFAULT
from longspec.errors import UserError

CONTROL, USER_DEFINED = 3, 4
"""GGUF token types: special tokens, and ordinary tokens that are never split."""
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by their names in transformers and in GGUF."""
GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS_SPLIT = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT])


def _byte_level(digits: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of Llama 3 and Qwen2, which differ in the length of a digit run; digits: its pattern."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


LLAMA3, QWEN2 = _byte_level(r"\p{N}{1,3}"), _byte_level(r"\p{N}")
SPLITS = {
    "gpt-2": GPT2_SPLIT,
    "smollm": DIGITS_SPLIT,
    "starcoder": DIGITS_SPLIT,
    "refact": DIGITS_SPLIT,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""Pre-tokenizers by the value of `tokenizer.ggml.pre`."""


def write_tokenizer(folder: Path, metadata: Mapping[str, Any], max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for a byte-level BPE or a SentencePiece BPE.

    metadata: the file's, by GGUF key. max_length: in tokens. Raises UserError for another kind of tokenizer and for an
    unknown pre-tokenizer.
    """
    prefix = "tokenizer.ggml."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    tokens, model = own.get("tokens"), own.get("model")
    if tokens is None:
        raise UserError("has no tokenizer; use the model's own folder")

    ids = {name: own.get(f"{key}_token_id") for name, key in SPECIAL.items()}
    special = {name: tokens[number] for name, number in ids.items() if number is not None}
    if model == "gpt2":
        tokenizer = _byte_level_bpe(tokens, own.get("merges", []), own.get("pre", "gpt-2"))
    elif model == "llama":
        prefixed = own.get("add_space_prefix", True)
        tokenizer = _sentencepiece_bpe(tokens, own["scores"], special.get("unk"), prefixed)
    else:
        raise UserError(f"a tokenizer of kind {model!r}; supported are 'gpt2' and 'llama'")

    # These tokens are matched before the text is split.
    types = own.get("token_type", [])
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in whole])

    # Without a setting, llama.cpp adds the BOS for these kinds of tokenizers.
    adds_bos = own.get("add_bos_token", model == "llama" or SPLITS.get(own.get("pre", "")) is LLAMA3)
    if adds_bos and "bos" in special:
        bos = special["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )

    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in special.items()},
    }
    if templates := _chat_templates(metadata):
        settings["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _chat_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template if it is the only one, all by name, or None."""
    names = metadata.get("tokenizer.chat_templates", [])
    templates = {name: text for name in names if (text := metadata.get(f"tokenizer.chat_template.{name}"))}
    if default := metadata.get("tokenizer.chat_template"):
        templates[DEFAULT] = default
    named = [{"name": name, "template": text} for name, text in templates.items()]
    return default if default and len(named) == 1 else named or None


def _byte_level_bpe(tokens: list[str], merges: list[str], split: str) -> Tokenizer:
    if split not in SPLITS:
        raise UserError(f"the unknown pre-tokenizer {split!r}; use the model's own folder")
    vocab = {token: number for number, token in enumerate(tokens)}
    # GGUF writes a merge as "left right"; byte-level tokens contain no space.
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=SPLITS[split] is LLAMA3))
    # Qwen2 is trained on text in Unicode form NFC.
    if SPLITS[split] is QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(tokens: list[str], scores: list[float], unknown: str | None, prefixed: bool) -> Tokenizer:
    """A BPE with SentencePiece's merges: the adjacent pair whose token has the highest score is merged first."""
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        # SentencePiece has scores instead of merges: any split into two tokens is a merge.
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(-score, vocab[a], vocab[b], (a, b)) for a, b in halves if a in vocab and b in vocab]
    pairs = [pair for *_, pair in sorted(merges)]
    tokenizer = Tokenizer(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    # SentencePiece writes a space as ▁ (U+2581).
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer
