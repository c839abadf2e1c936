"""A run of the experiment with a tiny random pair, for tests: the folders that training would have left."""

import json
from pathlib import Path

import torch
from pairs import make_pair
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer

from scripts.reproduce.cells import Measurement
from scripts.reproduce.plan import EvaluationSettings
from scripts.reproduce.run import Run
from scripts.reproduce.tokens import HELD_OUT_IDS, write_ids

CONTEXTS = (64, 128)
SHAPE = (2, 3)
PLAIN_CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def small_run(root: Path, family: str = "llama") -> Run:
    """Two tasks at two contexts, three prompts each; held-out text; a draft after each stage; training logs."""
    run = Run(root, family, "tiny")
    model = make_pair(run.target, family, vocab_size=VOCAB_SIZE)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN_CHAT
    tokenizer.save_pretrained(run.target)
    for stage in (1, 2, 3):
        folder = run.draft("sinkpi-slicing", stage)
        folder.mkdir(parents=True)
        torch.save(model.draft_model.state_dict(), folder / "draft_model_weights.pth")
        losses = {step: 3.0 - stage * step / 10 for step in range(1, 6)}
        log = [{"step": step, "loss": loss, "eval_loss": loss} for step, loss in losses.items()]
        (folder.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    training = [{"step": n, "seconds": n, "tokens": n, "loss": 5.0 / n} for n in range(1, 5)]
    training[2]["held_out_loss"] = 2.0
    (run.target / "training.json").write_text(json.dumps(training))
    (root / "tasks").mkdir()
    for context in CONTEXTS:
        for task in ("lcc", "gsm8k"):
            records = [
                {"_id": f"r{n}", "input": f"{n}?", "context": (f"x{n} = {n} + {context}\n" * 99)[: context - 60]}
                for n in range(3)
            ]
            run.tasks(task, context).write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "tokens").mkdir()
    texts = ("".join(f"def f{n}_{i}(): return {i * n}\n" for i in range(30)) for n in range(4))
    write_ids(root / "tokens" / HELD_OUT_IDS, texts, tokenizer)
    return run


def small_settings(*plan: Measurement) -> EvaluationSettings:
    return EvaluationSettings(
        limit_s=100.0,
        tasks=("lcc", "qmsum", "gsm8k"),
        contexts=CONTEXTS,
        new_tokens=9,
        gamma=2,
        plan=plan,
        forced_rows=2,
        forced_tokens=64,  # as many as the shorter context has
    )
