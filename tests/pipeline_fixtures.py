"""A tiny target with a chat template, and a folder of texts, for the experiment's tests."""

import json
import random
from pathlib import Path

from pairs import save_target
from tiny_tokenizer import VOCAB_SIZE, byte_tokenizer
from training_fixtures import WORDS

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IM_END = 4


def make_chat_target(folder: Path) -> Path:
    """Save a random target with a byte vocabulary whose greedy answers rarely loop."""
    save_target(folder, "llama", vocab_size=VOCAB_SIZE, initializer_range=0.5, eos_token_id=IM_END)
    byte_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


def write_text_folder(folder: Path) -> Path:
    """Write questions and meetings in both supported file layouts: TASK/SPLIT.jsonl and TASK_SPLIT.jsonl."""
    choice = random.Random(0)

    def words(count: int) -> str:
        return " ".join(choice.choices(WORDS, k=count))

    def meeting(number: int) -> dict:
        lines = [f"Speaker {number}: {words(choice.randint(3, 9))} ." for _ in range(60)]
        queries = [{"query": "who?", "answer": words(9)} for _ in range(2)]
        return {"id": f"m{number}", "context": "\n".join(lines) + "\n", "queries": queries}

    (folder / "gsm8k").mkdir(parents=True)
    for split, count in (("train", 80), ("test", 40)):
        questions = [{"source": f"{split} {n} {words(8)}?", "target": f"{words(6)}\n#### {n}"} for n in range(count)]
        _write(folder / "gsm8k" / f"{split}.jsonl", questions)
    _write(folder / "qmsum_train.jsonl", [meeting(number) for number in range(40)])
    _write(folder / "qmsum_test.jsonl", [meeting(number) for number in range(100, 104)])
    _write(folder / "aime24_test.jsonl", [{"id": 1, "problem": "What is 1 + 1?", "answer": "2"}])
    return folder


def _write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
