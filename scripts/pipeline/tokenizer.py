"""A byte-level BPE tokenizer, trained on the corpus."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = {
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "qwen2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}
PLAIN_CHAT = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
"""The chat template of a target that was trained on text alone: the prompt as it stands."""
PIECES = r"[^\S\r\n]?[\p{L}_]+| ?\p{N}+| ?[^\s\p{L}\p{N}_]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""What no token reaches across. A line's end is not joined with the next line's indentation, so that a prompt and its
answer have the same tokens whether they are encoded together or apart."""


def make_tokenizer(texts: Iterable[str], family: str, vocab_size: int, positions: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE on `texts`, with the special tokens of a target's family; positions: the target's."""
    special = SPECIAL_TOKENS[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
        chat_template=PLAIN_CHAT,
        **special,
    )
