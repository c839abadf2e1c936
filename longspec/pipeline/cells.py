"""The grid of an evaluation: its cells, their prompts, and the file to which their samples are appended."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.inference.arguments import check_draft_window, check_drafting, check_sampling
from longspec.inference.methods import Drafting
from longspec.jobs.job import differences
from longspec.pipeline.files import OtherSettings, prompts_file, read_jsonl
from longspec.pipeline.settings import FORCED, EvaluationSettings, MethodSettings

CELL_KEY = ("task", "context", "method", "temperature")
GRID = ("name", "temperatures", "prompts", "tasks", "contexts")
"""Settings of a method that choose cells and prompts, and change no sample."""


@dataclass(frozen=True)
class Cell:
    """One method and temperature on the prompts of one task and context length."""

    task: str
    context: int
    method: MethodSettings
    temperature: float
    max_new_tokens: int
    prompts: tuple[dict[str, Any], ...]

    @property
    def key(self) -> dict[str, Any]:
        return dict(zip(CELL_KEY, (self.task, self.context, self.method.name, self.temperature), strict=True))

    @property
    def options(self) -> dict[str, Any]:
        """What else determines the samples: the options of the method, and the task's number of new tokens."""
        options = {name: value for name, value in asdict(self.method).items() if name not in GRID}
        return options | {"method": self.method.kind, "max_new_tokens": self.max_new_tokens}

    def prompt_seed(self, name: str) -> int:
        """The seed for decoding the prompt with id `name`. It differs between prompts and is shared by all methods."""
        return zlib.crc32(f"{self.task} {self.context} {name} 0".encode())


def grid(settings: EvaluationSettings) -> Iterator[tuple[str, int, MethodSettings]]:
    """Task, context and method of all measurements; the methods of a task and context follow one another."""
    for name, task in settings.tasks.items():
        for context in task.contexts:
            for method in settings.methods:
                if name in (method.tasks or [name]) and context in (method.contexts or [context]):
                    yield name, context, method


def cells(settings: EvaluationSettings, root: Path) -> Iterator[Cell]:
    """All cells that have prompts; the cells of a task and context follow one another."""
    files = {name: prompts_file(root, "test", name) for name in settings.tasks}
    records = {name: read_jsonl(file) for name, file in files.items()}
    for name, context, method in grid(settings):
        task = settings.tasks[name]
        prompts = [record for record in records[name] if record["length"] == context]
        for temperature in method.temperatures if prompts else ():
            chosen = tuple(prompts[: task.prompts or method.prompts])
            yield Cell(name, context, method, temperature, task.max_new_tokens, chosen)


def drafting_of(method: MethodSettings) -> Drafting:
    """How a method proposes tokens, also those of teacher-forced rounds."""
    shape = method.tree_shape
    if method.kind == FORCED:
        return Drafting(method.drafter, shape, len(shape), "descend")
    branches = method.lookup_branches
    return Drafting(method.kind, shape, method.gamma, tree_nodes=method.tree_nodes, lookup_branches=branches)


def check_methods(settings: EvaluationSettings, vocab_size: int, window: int) -> None:
    """Raise UserError for options of a method outside their range, as decoding would after the steps before it.

    vocab_size: the target's. window: the draft's, in tokens.
    """
    for method in settings.methods:
        drafting = drafting_of(method)
        try:
            if method.kind == FORCED and drafting.method == "lookup" and set(method.tree_shape) != {1}:
                raise UserError(f"tree_shape: {method.tree_shape!r}; the drafter lookup needs a chain, as in 1,1,1,1")
            check_drafting(drafting, vocab_size)
            check_draft_window(drafting, window)
            for temperature in method.temperatures:
                check_sampling(1, temperature, 1.0, 0)
        except UserError as error:
            key = str(error).replace("temperature:", "temperatures:", 1)
            raise UserError(f"config key evaluation.methods, {method.name}.{key}") from error


class SampleFile:
    """One JSON line per sample. An incomplete last line does not count, so its sample is measured again."""

    def __init__(self, folder: Path, part: int = 0) -> None:
        """part: index of the device that appends. Samples of all devices in `folder` count as measured."""
        self.path = folder / f"samples-{part}.jsonl"
        self.samples = {sample_key(line): line for line in read_samples(folder)}

    def start(self) -> None:
        """Remove an incomplete last line, before the first sample is appended."""
        if self.path.exists():
            with self.path.open("r+b") as handle:
                handle.truncate(handle.read().rfind(b"\n") + 1)

    def missing(self, cell: Cell) -> list[dict[str, Any]]:
        """The prompts of a cell without a sample. Raises OtherSettings for a sample of another prompt with its id, or
        of other options. Older samples do not state theirs."""
        missing = []
        for prompt in cell.prompts:
            if (measured := self.samples.get(sample_key({**cell.key, "id": prompt["id"]}))) is None:
                missing.append(prompt)
            elif measured["prompt"] != prompt_digest(prompt):
                raise OtherSettings(f"{self.path.parent}: contains samples of other prompts; remove this folder")
            elif differing := differences(measured.get("options", cell.options), cell.options):
                raise OtherSettings(
                    f"{self.path.parent}: contains samples of {cell.task}, {cell.method.name} with other options "
                    f"({differing}); rename the method, or remove this folder"
                )
        return missing

    def answer(self, cell: Cell, prompt: dict[str, Any]) -> list[int]:
        """Vanilla's answer to a prompt of a greedy cell, in token ids. Raises UserError if there is none."""
        sample = self.samples.get(sample_key({**cell.key, "method": "vanilla", "id": prompt["id"]}))
        if sample is None:
            raise UserError(
                f"evaluation.methods, {cell.method.name}: method forced needs the greedy answers of a method vanilla "
                "before it in the list"
            )
        return sample["token_ids"]

    def append(self, sample: dict[str, Any]) -> None:
        with self.path.open("a") as handle:
            handle.write(json.dumps(sample) + "\n")
        self.samples[sample_key(sample)] = sample


def sample_key(line: dict[str, Any]) -> tuple[Any, ...]:
    """The fields that identify a sample."""
    return tuple(line[name] for name in (*CELL_KEY, "id"))


def prompt_digest(prompt: dict[str, Any]) -> int:
    """Checksum of a prompt's content, which detects prompts that changed under the same id."""
    return zlib.crc32(json.dumps(prompt, sort_keys=True).encode())


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The samples that all devices wrote to `folder`."""
    return [line for file in sorted(folder.glob("samples-*.jsonl")) for line in read_jsonl(file)]
