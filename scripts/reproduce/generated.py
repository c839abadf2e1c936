"""Text by the target itself, at temperature 1: what its drafts can be trained on instead of the corpus."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from longspec import generate
from longspec.models.families import family_class
from longspec.models.target_files import load_tokenizer, read_config
from scripts.pipeline.files import TEXTS, read_jsonl, write_jsonl
from scripts.pipeline.machine import gpus
from scripts.reproduce.corpus import DRAFT_TEXTS


@dataclass(frozen=True)
class GenerationSettings:
    texts: int
    prompt: int
    """Tokens of a text's beginning, which are the corpus's."""
    new_tokens: int
    batch: int
    seed: int = 0


def write_generated(folder: Path, corpus: Path, target: Path, settings: GenerationSettings) -> None:
    """`folder`/texts.jsonl: the beginnings of stage 1's texts, each with what the target goes on with."""
    config = read_config(str(target))
    tokenizer: Any = load_tokenizer(str(target), config)
    device, dtype = ("cuda", torch.bfloat16) if gpus() else ("cpu", torch.float32)
    family: Any = family_class(config, str(target))
    pair = family.from_pretrained(target, torch_dtype=dtype)
    model = pair.to(device).eval()
    write_jsonl(folder / TEXTS, ({"text": text} for text in generated(model, tokenizer, corpus, settings)))


def generated(model: Any, tokenizer: Any, corpus: Path, settings: GenerationSettings) -> Iterator[str]:
    prompts = beginnings(corpus, tokenizer, settings)
    for number, batch in enumerate(tqdm(prompts.split(settings.batch), unit="batch", disable=None)):
        out = generate(
            model,
            batch.to(model.device),
            method="vanilla",
            max_new_tokens=settings.new_tokens,
            temperature=1.0,
            seed=settings.seed + number,
        )
        for prompt, new in zip(batch, out.new_tokens, strict=True):
            yield tokenizer.decode([*prompt.tolist(), *new.tolist()], skip_special_tokens=True)


def beginnings(corpus: Path, tokenizer: Any, settings: GenerationSettings) -> Tensor:
    """The first tokens of random texts of stage 1, LongTensor [texts, prompt]; from a few texts some come again."""
    texts = [record["text"] for record in read_jsonl(corpus / DRAFT_TEXTS)]
    chance = random.Random(settings.seed)
    rows: list[list[int]] = []
    while len(rows) < settings.texts:
        text = chance.choice(texts)[: 8 * settings.prompt]
        ids = tokenizer(text, verbose=False)["input_ids"][: settings.prompt]
        if len(ids) == settings.prompt:
            rows.append(ids)
    return torch.tensor(rows)
