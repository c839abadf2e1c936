"""Paths of an experiment's files, and functions that read and write them."""

import json
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.replacing import replacing


def prompts_file(root: Path, split: str, group: str) -> Path:
    return root / "prompts" / split / f"{group}.jsonl"


def answers_file(root: Path, name: str, split: str) -> Path:
    return root / "answers" / name / f"{split}.jsonl"


def claim(file: Path, facts: dict[str, Any]) -> None:
    """Record in a JSON file the facts that determine the content of other files.

    Raises UserError if `file` exists and records different facts.
    """
    written = json.loads(json.dumps(facts))  # as they read back: tuples become lists
    if not file.is_file():
        write_atomically(file, json.dumps(written, indent=1) + "\n")
        return
    before = json.loads(file.read_text())
    if differing := [name for name in written | before if written.get(name) != before.get(name)]:
        name = differing[0]
        raise UserError(
            f"{file}: made with {name} {before.get(name)}, not {written.get(name)}; "
            "use another --root, or remove this file and the files it describes"
        )


def write_atomically(file: Path, text: str) -> None:
    """Write a file completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as unfinished:
        unfinished.write_text(text)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file. An incomplete last line is ignored."""
    lines = file.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]
