"""The trained pair in memory, and the prompts it is asked."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.longbench.prompts import Question, encode_question
from longspec.models.families import family_class
from longspec.models.target_files import load_tokenizer, read_config
from scripts.pipeline.files import read_jsonl
from scripts.pipeline.quality import distinct_share
from scripts.reproduce.tasks import TEMPLATES

CHAT_FORMAT = "tokenizer"
CODE_TASKS = ("lcc", "repobench-p")


@dataclass(frozen=True)
class Prompt:
    task: str
    context: int
    id: str
    token_ids: Tensor
    """LongTensor [1, P], on the model's device."""


@dataclass(frozen=True)
class LoadedPair:
    model: Any
    tokenizer: Any

    def prompts(self, path: Path, task: str, context: int, most: int) -> list[Prompt]:
        """The first `most` prompts of a task's file, as the target reads them."""
        form, family = TEMPLATES[task], self.model.config.model_type
        found = []
        for record in read_jsonl(path)[:most]:
            text = form.prompt.format(**{field: record[field] for field in form.fields})
            question = Question(str(record[form.id_field]), text)
            sample = encode_question(question, family, self.tokenizer, CHAT_FORMAT)
            ids = torch.tensor([sample.token_ids], device=self.model.device)
            found.append(Prompt(task, context, sample.id, ids))
        return found


def load_pair(target: Path, draft: Path) -> LoadedPair:
    """bf16 on a CUDA device, else fp32 on the CPU."""
    cuda = torch.cuda.is_available()
    config = read_config(str(target))
    family = family_class(config, str(target))
    dtype = torch.bfloat16 if cuda else torch.float32
    model: Any = family.from_pretrained(target, glide_path=draft, torch_dtype=dtype)
    return LoadedPair(model.to("cuda" if cuda else "cpu").eval(), load_tokenizer(str(target), config))


def sample_line(
    model: Any, prompt: Prompt, tokens: list[int], decoded: int, decode_s: float, ttft_s: float
) -> dict[str, Any]:
    """What the results tell of a sample, whatever decoded it.

    decoded, decode_s: tokens and seconds without prefill and the token that it gives; ttft_s: the seconds up to that.
    """
    share, ends = distinct_share([tokens]), model.generation_config.eos_token_id
    return {
        "id": prompt.id,
        "prompt_tokens": prompt.token_ids.shape[1],
        "new_tokens": len(tokens),
        "decoded_tokens": decoded,
        "decode_s": decode_s,
        "tokens_per_second": decoded / decode_s if decode_s else None,
        "ttft_s": ttft_s,
        "distinct_4grams": None if math.isnan(share) else share,
        "stopped_at_eos": tokens[-1] in (ends if isinstance(ends, list) else [ends]),
        "token_ids": tokens,
    }
