"""What the training tests run on: a tiny target with a byte tokenizer, JSONL files, and the real launcher."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pairs import save_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
SPECIALS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "target", "reads", "a", "prompt", "and", "its", "draft", "guesses", "what", "comes", "next")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the marks of both chat formats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        additional_special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
    )


def make_target(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """A random target of 3 layers with its tokenizer."""
    tokenizer = byte_tokenizer()
    save_target(folder, family, vocab_size=len(tokenizer) + 3, initializer_range=0.1, **overrides)
    tokenizer.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int = 40, words: int = 60) -> Path:
    """Plain text records of uneven lengths."""
    choice = random.Random(0)
    texts = [" ".join(choice.choices(WORDS, k=choice.randint(words // 4, words))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_answers(path: Path, count: int = 40) -> Path:
    """Records with a prompt and an answer, of uneven lengths."""
    choice = random.Random(1)

    def text() -> str:
        return " ".join(choice.choices(WORDS, k=choice.randint(3, 25)))

    records = [{"problem": text(), "solution": text()} for _ in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def launch(
    experiment: str, *overrides: str, ranks: int = 2, script: str = "./trainer_base_ds_mul_fs_tp.py"
) -> subprocess.CompletedProcess[str]:
    """The launch line of the README on CPU ranks (or another script with the same arguments), whatever it returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}
    environment["DS_ACCELERATOR"] = "cpu"
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
    launcher += ["--master_port", str(_free_port()), script, "-cp", "conf/exp/"]
    return subprocess.run(
        [*launcher, "-cn", experiment, *overrides],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
    )


def launched(experiment: str, *overrides: str, ranks: int = 2, script: str = "./trainer_base_ds_mul_fs_tp.py") -> str:
    """What a launch that must succeed says on stderr."""
    result = launch(experiment, *overrides, ranks=ranks, script=script)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stderr


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
