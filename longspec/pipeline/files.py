"""Paths in the output folder, and functions that read and write files."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.jobs.job import differences
from longspec.pipeline.settings import StageSettings
from longspec.replacing import write_atomically


def settings_file(root: Path) -> Path:
    """The settings that made the folder, with which every process of a step works."""
    return root / "settings.yaml"


def prompts_file(root: Path, split: str, group: str) -> Path:
    return root / "prompts" / split / f"{group}.jsonl"


def answers_file(root: Path, name: str, split: str) -> Path:
    return root / "answers" / name / f"{split}.jsonl"


class OtherSettings(UserError):
    """The settings differ from those that made a file."""


@contextmanager
def run_settings(root: Path, settings: str) -> Iterator[None]:
    """Write the settings of a folder. OtherSettings in the context restores those that the folder had, if any."""
    file = settings_file(root)
    before = file.read_bytes() if file.exists() else None
    write_atomically(file, settings)
    try:
        yield
    except OtherSettings:
        if before is None:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, before)
        raise


def claim(file: Path, facts: dict[str, Any], added: Collection[str] = ()) -> None:
    """Record facts that determine other files, of which older files lack `added`. Raises OtherSettings for others."""
    if not file.is_file():
        write_atomically(file, json.dumps(facts, indent=1) + "\n", make_folder=True)
    stored = json.loads(file.read_text())
    current = {name: value for name, value in facts.items() if name in stored or name not in added}
    if differing := differences(stored, current):
        raise OtherSettings(
            f"{file}: made with other settings ({differing}); "
            "use another --output_dir, or remove this file and the files it describes"
        )


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file, [] if there is none. An incomplete last line is ignored."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines if line.strip()]


def answer_files(root: Path, names: list[str], split: str) -> list[str]:
    """Absolute paths of the existing answer files of the runs `names`. Raises UserError if there are none.

    Training reads a run as often as it is named; held-out files are listed once. Links are resolved: arms read the
    recipe's files through links, and cached tokens are found by path.
    """
    once = names if split == "train" else dict.fromkeys(names)
    files = [answers_file(root, name, split).resolve() for name in once]
    if not (existing := [str(file) for file in files if file.exists()]):
        raise UserError(f"{files[0]}: no such file; the target has not written it yet")
    return existing


def training_files(root: Path, stage: StageSettings) -> list[str]:
    """Absolute paths of a stage's training data. Records to replay are spread evenly over their run's file."""
    files = answer_files(root, stage.answers, "train")
    for name, count in stage.replay.items():
        whole = answers_file(root, name, "train").resolve()
        part = whole.with_name(f"train-{count}.jsonl")
        if whole.exists():
            if not part.exists():  # a running stage may read it
                lines = whole.read_bytes().splitlines(keepends=True)
                kept = min(count, len(lines))
                chosen = (lines[number * len(lines) // kept] for number in range(kept))
                write_atomically(part, b"".join(chosen))
            files.append(str(part))
    return files
