"""The grid of an evaluation: its cells, their prompts, and the file of samples that is continued."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.files import prompts_file, read_jsonl
from experiments.settings import EvaluationSettings, MethodSettings
from longspec.errors import UserError

CELL_KEY = ("task", "context", "method", "temperature", "seed")


@dataclass(frozen=True)
class Cell:
    """A method on one task at one context."""

    task: str
    context: int
    method: MethodSettings
    temperature: float
    seed: int
    max_new_tokens: int
    prompts: tuple[dict[str, Any], ...]

    @property
    def key(self) -> dict[str, Any]:
        values = (self.task, self.context, self.method.name, self.temperature, self.seed)
        return dict(zip(CELL_KEY, values, strict=True))

    def prompt_seed(self, name: str) -> int:
        """The seed of one prompt's random numbers; no two prompts share one, methods do."""
        return zlib.crc32(f"{self.task} {self.context} {name} {self.seed}".encode())


def cells(settings: EvaluationSettings, root: Path) -> Iterator[Cell]:
    """All cells that have prompts, those of one task and context together."""
    for task, of_task in settings.tasks.items():
        file = prompts_file(root, "test", task)
        records = read_jsonl(file) if file.exists() else []
        for context in of_task.contexts:
            prompts = [record for record in records if record["length"] == context]
            for method in settings.methods:
                if not prompts or task not in (method.tasks or [task]) or context not in (method.contexts or [context]):
                    continue
                for temperature in method.temperatures:
                    # A greedy output does not depend on the seed.
                    for seed in range(method.seeds if temperature else 1):
                        chosen = tuple(prompts[: method.prompts])
                        yield Cell(task, context, method, temperature, seed, of_task.max_new_tokens, chosen)


class SampleFile:
    """A JSON line per sample; a line that was cut off is dropped, and its sample is measured again."""

    def __init__(self, folder: Path, part: int = 0) -> None:
        """part: the number of the device that appends; samples of all devices count as measured."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"samples-{part}.jsonl"
        written = self.path.read_bytes() if self.path.exists() else b""
        if written and not written.endswith(b"\n"):
            with self.path.open("r+b") as handle:
                handle.truncate(written.rfind(b"\n") + 1)
        self.prompts = {sample_key(line): line["prompt"] for line in read_samples(folder)}

    def missing(self, cell: Cell) -> list[dict[str, Any]]:
        """The prompts of a cell that have no sample yet. Raises UserError for a sample of another prompt."""
        missing = []
        for prompt in cell.prompts:
            measured = self.prompts.get(sample_key({**cell.key, "id": prompt["id"]}))
            if measured is None:
                missing.append(prompt)
            elif measured != prompt_digest(prompt):
                raise UserError(f"{self.path.parent}: has samples of other prompts; remove this folder")
        return missing

    def append(self, sample: dict[str, Any]) -> None:
        with self.path.open("a") as handle:
            handle.write(json.dumps(sample) + "\n")
        self.prompts[sample_key(sample)] = sample["prompt"]


def sample_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in (*CELL_KEY, "id"))


def prompt_digest(prompt: dict[str, Any]) -> int:
    """Tells prompts with the same id apart."""
    return zlib.crc32(json.dumps(prompt, sort_keys=True).encode())


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The samples of all devices."""
    return [line for file in sorted(folder.glob("samples-*.jsonl")) for line in read_jsonl(file)]
