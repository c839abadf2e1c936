"""What the pair can do on held-out code: the four methods through the command, and what puts their figures in place."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from longspec.longbench.report import SAMPLES_NAME, SUMMARY_NAME
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide
from longspec.models.qwen2 import Qwen2Glide
from scripts.demo.corpus import TASK
from scripts.demo.target import text_rows
from scripts.pipeline.files import HELD_OUT_TEXTS, TEXTS, read_jsonl, write_json
from scripts.pipeline.forced import teacher_forced_acceptance
from scripts.pipeline.machine import gpus, run
from scripts.pipeline.quality import bigram_nats, bits_per_byte, bytes_of_tokens, distinct_share, target_nats

PAIRS: dict[str, type[GlideMixin]] = {"llama": LlamaGlide, "qwen2": Qwen2Glide}
METHODS = ("vanilla", "seq", "tree", "magicdec")
UNTRAINED = "untrained"
RESULTS = "results.json"


@dataclass(frozen=True)
class EvaluationSettings:
    family: str = "llama"
    new_tokens: int = 64
    gamma: int = 4
    tree_shape: tuple[int, ...] = (4, 16, 16, 16, 16)
    row_length: int = 1024
    """Tokens in a row of held-out text."""
    rows: int = 48
    """Of them, spread over the held-out files, for bits per byte."""
    forced_rows: int = 12
    forced_prompt: int = 768


def evaluate(folder: Path, corpus: Path, target: Path, draft: Path, settings: EvaluationSettings) -> None:
    """Everything measured, into `folder`/results.json. draft: the folder of the last stage's checkpoint."""
    logging.disable_progress_bar()
    untrained = folder / UNTRAINED
    untrained.mkdir()
    pair = PAIRS[settings.family]
    torch.manual_seed(0)
    fresh = pair.from_pretrained(target, torch_dtype=torch.float32).draft_model.state_dict()
    torch.save(fresh, untrained / DRAFT_WEIGHTS_NAME)
    runs = {method: run_method(folder / method, method, corpus, target, draft, settings) for method in METHODS}
    runs[UNTRAINED] = run_method(folder / "tree_untrained", "tree", corpus, target, untrained, settings)
    results = {"runs": runs, "text": on_held_out_text(corpus, target, draft, settings)}
    write_json(folder / RESULTS, results)


def run_method(
    folder: Path, method: str, corpus: Path, target: Path, draft: Path, settings: EvaluationSettings
) -> dict[str, Any]:
    """One run of the command: its summary, and `token_ids` of every sample."""
    folder.mkdir()
    options = {
        "method": method,
        "task": TASK,
        "target": target,
        "draft": draft,
        "data_path_prefix": corpus,
        "min_prompt_len": 0,
        "chat_format": "tokenizer",
        "max_gen_len": settings.new_tokens,
        "gamma": settings.gamma,
        "dtype": "float32",
        "output_dir": folder,
    }
    command = [sys.executable, "inference_long-bench.py"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command += ["--tree_shape", *map(str, settings.tree_shape)]
    run(command, folder / "log.txt", {"OMP_NUM_THREADS": "1"})
    summary = json.loads((folder / SUMMARY_NAME).read_text())
    samples = {sample["id"]: sample["token_ids"] for sample in read_jsonl(folder / SAMPLES_NAME)}
    return {"summary": summary, "token_ids": samples, "distinct_4grams": distinct_share(list(samples.values()))}


def on_held_out_text(corpus: Path, target: Path, draft: Path, settings: EvaluationSettings) -> dict[str, float]:
    """Bits per byte of the target and of a bigram on the same held-out text, and teacher-forced acceptance there."""
    device = "cuda" if gpus() else "cpu"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    texts = [record["text"] for record in read_jsonl(corpus / HELD_OUT_TEXTS)]
    rows = text_rows(texts, tokenizer, settings.row_length)
    rows = rows[:: max(1, len(rows) // settings.rows)][: settings.rows]
    train = text_rows([record["text"] for record in read_jsonl(corpus / TEXTS)], tokenizer, 1).flatten()
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    byte_counts = bytes_of_tokens(tokenizer)
    pair: Any = PAIRS[settings.family].from_pretrained(target, glide_path=draft, torch_dtype=torch.float32)
    forced_rows = rows[:: max(1, len(rows) // settings.forced_rows)][: settings.forced_rows].to(device)
    prompts, ends = ([length] * len(forced_rows) for length in (settings.forced_prompt, settings.row_length))
    forced = teacher_forced_acceptance(pair.to(device).eval(), forced_rows, prompts, ends, settings.tree_shape)
    assert forced is not None, "rows are longer than their prompts by several trees"
    return {
        "target_bits_per_byte": bits_per_byte(target_nats(model.to(device), rows), rows, byte_counts),
        "bigram_bits_per_byte": bits_per_byte(bigram_nats(train, rows, model.config.vocab_size), rows, byte_counts),
        "teacher_forced_acceptance": forced.acceptance_length,
    }
