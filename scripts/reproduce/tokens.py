"""The corpus as token ids: one memory-mapped array for each kind of text, made once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from scripts.pipeline.files import ANSWERS, HELD_OUT_TEXTS, TEXTS, read_jsonl
from scripts.reproduce.corpus import TOKENIZER

ID = np.uint16
"""Vocabularies of this experiment are far below 65536."""
TEXT_IDS, ANSWER_IDS, HELD_OUT_IDS = "texts.bin", "answers.bin", "held_out.bin"
BATCH = 512


@dataclass(frozen=True)
class TokenSettings:
    vocab_size: int


def write_tokens(folder: Path, corpus: Path) -> None:
    """The texts, the prompts with their answers, and the held-out texts, each with an EOS behind it, end to end."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(corpus / TOKENIZER)
    write_ids(folder / TEXT_IDS, (record["text"] for record in read_jsonl(corpus / TEXTS)), tokenizer)
    asked = (record["source"] + record["target"] for record in read_jsonl(corpus / ANSWERS))
    write_ids(folder / ANSWER_IDS, asked, tokenizer)
    write_ids(folder / HELD_OUT_IDS, (record["text"] for record in read_jsonl(corpus / HELD_OUT_TEXTS)), tokenizer)


def write_ids(path: Path, texts: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Batches of texts are encoded by all cores: the tokenizer's own threads."""
    left = iter(texts)
    with path.open("wb") as handle, tqdm(desc=path.stem, unit=" texts", disable=None) as bar:
        while batch := list(islice(left, BATCH)):
            for found in tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                np.array([*found.ids, tokenizer.eos_token_id], dtype=ID).tofile(handle)
            bar.update(len(batch))


def read_rows(path: Path, length: int) -> np.ndarray:
    """The array as rows [rows, length], memory-mapped; what is left at the end is not in them."""
    ids = np.memmap(path, dtype=ID, mode="r")
    return ids[: len(ids) // length * length].reshape(-1, length)


def shuffled(rows: np.ndarray, count: int, generator: np.random.Generator) -> Iterator[Tensor]:
    """Batches of `count` rows, LongTensor [count, length], without end, in a new order each time round."""
    left = np.empty(0, dtype=np.int64)
    while True:
        while len(left) < count:
            left = np.concatenate([left, generator.permutation(len(rows))])
        yield torch.from_numpy(rows[np.sort(left[:count])].astype(np.int64))
        left = left[count:]
