"""GGUF files for tests, written with the gguf package in the layout of llama.cpp's converter."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from pairs import GLIDE, save_target
from tiny_tokenizer import byte_tokenizer

from longspec.models.draft_layer import head_dim

CONTROL, NORMAL = 3, 1


def write_gguf(
    file: Path,
    family: str = "llama",
    quantized: bool = False,
    rope: dict[str, Any] | None = None,
    architecture: str | None = None,
    without: str = "",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write a random target with the byte tokenizer; the transformers model that the file describes.

    Mistral files are of architecture llama, as those of llama.cpp's converter.
    rope: GGUF metadata of the rotary scaling. without: leaves out the tensors whose names contain this.
    metadata: further entries of type str, int (uint16) or list of str.
    """
    vocab = byte_tokenizer().get_vocab()
    sizes = {"hidden_size": 64, "intermediate_size": 96} if quantized else {}
    folder = save_target(file.with_suffix(""), family, vocab_size=len(vocab), **sizes, **overrides)
    model = GLIDE[family].target_class.from_pretrained(folder)
    config = model.config
    written_as = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(file, architecture or written_as)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if (width := head_dim(config)) != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    for key, value in (rope or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{written_as}.rope.scaling.{key}", value)
    _add_tokenizer(writer, vocab)
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint16, list: writer.add_array}[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[written_as.upper()], config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        array = weight.float().numpy()
        if written_as == "llama" and "q_proj" in name:
            array = _interleaved(array, config.num_attention_heads)
        if written_as == "llama" and "k_proj" in name:
            array = _interleaved(array, config.num_key_value_heads)
        new = names.get_name(name, (".weight", ".bias"))
        if without and without in new:
            continue
        if quantized and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(new, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, array)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: dict[str, int]) -> None:
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token.startswith("<") and len(token) > 1 else NORMAL for token in tokens])
    writer.add_token_merges(["a b"]) if "ab" in vocab else writer.add_token_merges([])
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_pad_token_id(vocab["<pad>"])
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of each head next to each other, as rotations in llama.cpp want them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
