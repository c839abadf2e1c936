"""The shards of a split on disk, and the split's file that they are merged into."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from longspec.data.lines import data_files
from longspec.data.prompts import prompt_key
from longspec.data.records import Record, RecordError, read_records
from longspec.errors import UserError
from longspec.jobs.job import differences
from longspec.locks import locked
from longspec.regenerate.settings import Settings
from longspec.replacing import write_atomically
from longspec.untrusted import read_yaml

PROVENANCE_NAME = "provenance.yaml"
SHARDS, LARGEST = 128, 2048
"""Number of shards of a run, and the largest number of prompts in one; more prompts make more shards."""


def shard_size(total: int) -> int:
    """Prompts per shard by default, so few that a stopped run loses little."""
    return min(-(-total // SHARDS), LARGEST)


class SplitShards:
    """The shards of a split. They are written atomically, and a run resumes after the existing ones."""

    def __init__(self, settings: Settings, total: int, facts: dict[str, Any]) -> None:
        """total: number of prompts in all shards. facts: what determines their text, and versions of the libraries."""
        self.settings, self.total, self.facts = settings, total, facts
        self.count = -(-total // settings.shard_size)
        self.folder = Path(settings.output_dir) / f"{settings.split}.shards"
        self.output = Path(settings.output_dir) / f"{settings.split}.jsonl"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the text."""
        return self.facts | {"versions": None}

    def range(self, shard: int) -> range:
        """The numbers of a shard's prompts."""
        size = self.settings.shard_size
        return range(shard * size, min((shard + 1) * size, self.total))

    def path(self, shard: int) -> Path:
        # The name has no suffix, because a folder that is given as training data is searched for .json and .jsonl.
        return self.folder / f"shard-{shard:05d}-of-{self.count:05d}"

    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [shard for shard in range(self.count) if not self.path(shard).exists()]

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder and store the facts of the run in it. Raises UserError if it belongs to another run."""
        file = self.folder / PROVENANCE_NAME
        with locked(self.folder):
            # A run that failed before its first shard leaves only the facts.
            if not any(self.folder.glob("shard-*")):
                write_atomically(file, yaml.safe_dump(self.facts, sort_keys=False))
            elif differing := differences(read_yaml(file) | {"versions": None}, self.identity):
                raise UserError(
                    f"{self.folder}: has shards of a different run ({differing}); give another output folder, or "
                    "remove this one"
                )
            yield

    def write(self, shard: int, records: list[Record], dropped: Counter[str]) -> None:
        """Write a shard: a line with the counts of dropped texts, then a line per record."""
        lines = [{"dropped": dict(dropped)}, *records]
        write_atomically(self.path(shard), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def merge(self) -> Path:
        """Write the split's file without duplicate or excluded prompts. Raises UserError if no record is left."""
        seen = prompt_keys(self.settings.exclude)
        dropped: Counter[str] = Counter()
        lines = []
        new_tokens = 0
        for shard in range(self.count):
            # In order of shards, so the file does not depend on which rank was faster.
            head, *records = map(json.loads, self.path(shard).read_bytes().splitlines())
            dropped.update(head["dropped"])
            for row, record in enumerate(records):
                if (key := prompt_key(record)) in seen:
                    dropped["prompts: duplicates or excluded"] += 1
                    continue
                seen.add(key)
                new_tokens += record["new_tokens"]
                with_id = {"id": f"{self.settings.split}-{shard:05d}-{row:05d}", **record}
                lines.append(json.dumps(with_id, ensure_ascii=False) + "\n")

        if not lines:
            raise UserError(f"{self.folder}: no answer is left ({reasons(dropped)})")

        facts = read_yaml(self.folder / PROVENANCE_NAME)
        facts |= {"records": len(lines), "new_tokens": new_tokens, "dropped": dict(sorted(dropped.items()))}
        # The split's file comes last: if it exists, its provenance does, too.
        write_atomically(self.output.with_suffix(f".{PROVENANCE_NAME}"), yaml.safe_dump(facts, sort_keys=False))
        write_atomically(self.output, "".join(lines))
        return self.output


def describe(output: Path) -> str:
    """A line on the prompts of a split's file, and those that were dropped for each reason."""
    facts = read_yaml(output.with_suffix(f".{PROVENANCE_NAME}"))
    left_out = sum(facts["dropped"].values())
    line = f"{facts['records']} of {facts['records'] + left_out} prompts kept, {left_out} dropped"
    return f"{line} ({reasons(facts['dropped'])})" if left_out else line


def reasons(dropped: Mapping[str, int]) -> str:
    """The counts of dropped texts, as a part of a line."""
    return "; ".join(f"{reason} {count}" for reason, count in dropped.items() if count)


def prompt_keys(files: Sequence[str]) -> set[bytes]:
    """The keys of all prompts in files that this command wrote. Raises UserError for other files."""

    def key(record: Record) -> bytes:
        # Only records of this command have the prompt in the form that the key is computed from.
        if "messages" not in record and "prefix" not in record:
            raise RecordError(None, "exclude takes files that this command wrote")
        return prompt_key(record)

    return set(chain.from_iterable(read_records(path, key) for path in (data_files(files) if files else ())))
