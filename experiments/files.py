"""Where the files of an experiment lie, and how they are written and read."""

import json
from pathlib import Path
from typing import Any

from longspec.errors import UserError


def prompts_file(root: Path, split: str, group: str) -> Path:
    return root / "prompts" / split / f"{group}.jsonl"


def answers_file(root: Path, name: str, split: str) -> Path:
    return root / "answers" / name / f"{split}.jsonl"


def claim(file: Path, facts: dict[str, Any]) -> None:
    """Keep the facts that decide about files in a JSON file next to them. Raises UserError if it has other facts."""
    written = json.loads(json.dumps(facts))
    if not file.is_file():
        write_atomically(file, json.dumps(written, indent=1) + "\n")
        return
    before = json.loads(file.read_text())
    if differing := [name for name in written | before if written.get(name) != before.get(name)]:
        name = differing[0]
        raise UserError(
            f"{file}: made with {name} {before.get(name)}, not {written.get(name)}; "
            "give another --root, or remove this file and those that it is about"
        )


def write_atomically(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; a last line that was cut off does not count."""
    lines = file.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.strip()]
