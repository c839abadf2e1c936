"""Tiny targets with tokenizers of the shapes that real ones have, built without files or network.

`vicuna`: SentencePiece with byte fallback and no chat template, an old-style rope_scaling, sharded .bin weights.
`llama3`: byte-level BPE with header tokens; its EOS token is not the one that ends a turn.
`qwen3`: byte-level BPE without a BOS token, ChatML that thinks unless `enable_thinking` is false.
"""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from pairs import save_target
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SHAPES = ("vicuna", "llama3", "qwen3")
CORPUS = [
    "The target reads a prompt, and its draft guesses the words that come next.",
    "You are a helpful assistant. Write a one-page summary of the report.",
    "def add(first, second):\n    return first + second\n",
    "Meetings, reports, questions and answers: 0 1 2 3 4 5 6 7 8 9.",
]
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_real_target(folder: Path, shape: str) -> None:
    """A random target of 3 layers with a tokenizer of `shape`."""
    folder.mkdir(parents=True)
    {"vicuna": _vicuna, "llama3": _llama3, "qwen3": _qwen3}[shape](folder)


def sentencepiece_model(sentences: list[str], **options: Any) -> bytes:
    """A BPE model with byte fallback."""
    model, settings = io.BytesIO(), {"model_type": "bpe", "byte_fallback": True, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **settings)
    return model.getvalue()


def _vicuna(folder: Path) -> None:
    save_target(folder, "llama", vocab_size=380, bos_token_id=1, eos_token_id=2, max_position_embeddings=1024)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(CORPUS, vocab_size=380, pad_id=-1))
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    _write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **marks})
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    _write(folder, "config.json", config | {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}})
    _shard_as_bin(folder)


def _llama3(folder: Path) -> None:
    tokenizer = _byte_bpe(LLAMA3_TOKENS)
    bos = tokenizer.token_to_id(LLAMA3_TOKENS[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{LLAMA3_TOKENS[0]} $A", special_tokens=[(LLAMA3_TOKENS[0], bos)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=LLAMA3_TOKENS[0], eos_token=LLAMA3_TOKENS[1])
    fast.chat_template = LLAMA3_TEMPLATE
    ends = [tokenizer.token_to_id(LLAMA3_TOKENS[1]), tokenizer.token_to_id(LLAMA3_TOKENS[4])]
    _save(folder, "llama", fast, bos_token_id=bos, eos_token_id=ends)


def _qwen3(folder: Path) -> None:
    tokenizer = _byte_bpe(QWEN_TOKENS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=QWEN_TOKENS[2], pad_token=QWEN_TOKENS[0])
    fast.chat_template = QWEN3_TEMPLATE
    ends = [tokenizer.token_to_id(QWEN_TOKENS[2]), tokenizer.token_to_id(QWEN_TOKENS[0])]
    _save(folder, "qwen3", fast, eos_token_id=ends)


def _byte_bpe(special_tokens: tuple[str, ...]) -> Tokenizer:
    """Byte-level BPE with a few merges; the special tokens come last, as in the real vocabularies."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer


def _save(folder: Path, family: str, tokenizer: PreTrainedTokenizerFast, **ids: object) -> None:
    save_target(folder, family, vocab_size=len(tokenizer) + 5, **ids)
    tokenizer.save_pretrained(folder)


def _shard_as_bin(folder: Path) -> None:
    """The folder's safetensors as two pytorch_model-….bin files with their index."""
    file = folder / "model.safetensors"
    state = load_file(file)
    file.unlink()
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for part, held in parts.items():
        torch.save({name: state[name] for name in held}, folder / part)
    weight_map = {name: part for part, held in parts.items() for name in held}
    size = sum(weight.nbytes for weight in state.values())
    _write(folder, "pytorch_model.bin.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))
