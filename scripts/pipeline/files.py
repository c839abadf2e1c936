"""The corpus's files by name, and JSON and JSONL in general."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEXTS, LONG_TEXTS, ANSWERS, HELD_OUT_TEXTS = "texts.jsonl", "long_texts.jsonl", "answers.jsonl", "held_out.jsonl"


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    """One record a line."""
    with path.open("w", encoding="utf-8") as handle:
        for record in records:
            handle.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    """The records of a file. Lines end at "\\n" alone: a JSON string may hold U+2028 and the like as they are."""
    with path.open(encoding="utf-8", newline="\n") as handle:
        return [json.loads(line) for line in handle]


def write_json(path: Path, value: Any) -> None:
    """Write `value`, whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
