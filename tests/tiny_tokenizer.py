"""A tokenizer of bytes for tests: no files, no network, every text round-trips."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# transformers gives every tokenizer next to a Qwen2 config an <|endoftext|>.
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


def byte_tokenizer(chat_template: object = None, reversed_ids: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte after the special tokens; `reversed_ids` makes another tokenizer of the same size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reversed_ids)
    vocab = {token: number for number, token in enumerate(SPECIAL_TOKENS + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        chat_template=chat_template,
    )


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Of "a", "b" and "ab" after a mark at the start of each text; all other characters are <unk>."""
    words = {word: number for number, word in enumerate(["<unk>", "▁", "a", "b", "ab"])}
    backend = Tokenizer(models.BPE(words, [("a", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", additional_special_tokens=["<s>"])
