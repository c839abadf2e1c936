"""The evaluation: held-out prompts decoded with every method, on all GPUs."""

from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from longspec import load_pair
from longspec.data.prompts import loops
from longspec.errors import UserError
from longspec.inference.answering import Listener, answer_all
from longspec.inference.arguments import checked_drafting, end_tokens
from longspec.inference.device import choose_device, device_name, versions
from longspec.inference.generate import make_requests
from longspec.inference.options import WITHOUT_FILE
from longspec.inference.request import row_seed
from longspec.jobs.job import Count, ResumableJob
from longspec.models.content import state_digest
from longspec.models.draft_files import load_draft
from longspec.models.target_files import position_limit
from longspec.pipeline.cells import Cell, SampleFile, cells, drafting_of, prompt_digest
from longspec.pipeline.files import claim
from longspec.pipeline.forced import forced_acceptance
from longspec.pipeline.processes import share_work
from longspec.pipeline.settings import FORCED, Settings
from longspec.pipeline.target import TargetText
from longspec.pipeline.training import final_draft
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals
from longspec.untrusted import read_json

FACTS = "settings.json"
"""File with the draft, target, device and versions that all samples of a folder share."""
HEAD_TOKENS = 48
"""First tokens of a prompt that are kept when it is shortened; they hold the head of the chat format."""
WARM_UP_TOKENS = 16
FIGURES = ("rounds", "decoded_tokens", "decode_s", "ttft_s", "accepted_by_depth", "tree_shape", "rounds_by_plan")
"""Statistics of `generate` in a sample."""


def evaluation_folder(root: Path) -> Path:
    return root / "evaluation"


def _draft(settings: Settings, root: Path) -> str | None:
    """The draft of the evaluation; None if no stage trains one, for methods without a draft."""
    if settings.evaluation.draft or not settings.training.stages:
        return settings.evaluation.draft
    return str(final_draft(settings, root))


def evaluate(settings: Settings, root: Path) -> None:
    """Measure the missing samples. Raises UserError as `claim_samples` does, and if a process fails."""
    if claim_samples(settings, root):
        ranks = settings.tp_size if settings.tp_size > 1 else max(1, torch.cuda.device_count())
        share_work(measure, settings, root, ranks)


def claim_samples(settings: Settings, root: Path) -> int:
    """Record what all samples of the folder share, and return the number of missing ones. Raises UserError if the draft
    does not exist, OtherSettings for a folder with samples of another draft, target, device or version, of other
    prompts or of other options."""
    draft = _draft(settings, root)
    if draft and settings.evaluation.draft is None and not Path(draft).exists():
        raise UserError(f"{draft}: no such draft; train it first, or set evaluation.draft")
    file, missing = evaluation_folder(root) / FACTS, missing_samples(settings, root)
    if missing or file.exists():
        # A complete evaluation can be reported on any device.
        here = {"device": device_name(choose_device(None)), "versions": versions()} if missing else read_json(file)
        facts = {"draft": draft and state_digest(load_draft(draft)), "target": settings.target}
        # Here and not in the step's processes, whose errors reach this one as an exit code only.
        claim(file, here | facts)
    return missing


def missing_samples(settings: Settings, root: Path) -> int:
    """The number of samples to measure, as far as their prompts are written. Raises OtherSettings as `evaluate` does
    for samples that exist."""
    samples = SampleFile(evaluation_folder(root))
    return sum(len(samples.missing(cell)) for cell in cells(settings.evaluation, root))


def measure(settings: Settings, root: Path, replicas: Replicas) -> None:
    """Measure this process's samples. Raises UserError."""
    logging.disable_progress_bar()
    folder = evaluation_folder(root)
    decoder = Decoder(settings.target, _draft(settings, root), replicas.device(None))
    samples = SampleFile(folder, replicas.rank)
    samples.start()
    # All methods of a task and context run on the same device, because they are compared. The tasks of a context follow
    # one another, because they mostly need the same kernels.
    grid = sorted(cells(settings.evaluation, root), key=lambda cell: cell.context)
    groups = [list(group) for _, group in groupby(grid, lambda cell: (cell.task, cell.context))]
    total = sum(len(cell.prompts) for cell in grid)
    done = total - sum(len(samples.missing(cell)) for cell in grid)

    def work(own: Iterator[list[Cell]], count: Count) -> None:
        for cell in chain.from_iterable(own):
            for sample in decoder.samples(cell, samples.missing(cell), samples):
                samples.append(sample)
                count(1)

    def load(group: list[Cell]) -> int:
        return sum(len(cell.prompts) * (cell.context + cell.max_new_tokens) for cell in group)

    # A stop signal ends the process at once.
    job = ResumableJob(total, "sample", folder, StopSignals(), replicas)
    job.run(groups, load, work, done, "evaluation")


def shortened(ids: list[int], tokens: int | None) -> list[int]:
    """The first HEAD_TOKENS and the last ids of a prompt, `tokens` in all; None for the whole prompt."""
    if tokens is None or len(ids) <= tokens:
        return ids
    head = min(HEAD_TOKENS, tokens - 1)
    return ids[:head] + ids[head - tokens :]


class Decoder:
    """Continues prompts with the methods of `longspec.generate` and with FORCED."""

    def __init__(self, target: str, draft: str | None, device: str | None) -> None:
        """draft: None as for `load_pair`. device: None for the default one."""
        self.text = TargetText.load(target)
        self.model, _ = load_pair(target, draft=draft, device=device)
        self.warmed_up: set[tuple[str, float, int]] = set()
        """Methods, temperatures and rooms whose kernels are compiled."""

    def samples(self, cell: Cell, prompts: list[dict[str, Any]], measured: SampleFile) -> Iterator[dict[str, Any]]:
        """Decode prompts, one after another or, with method FORCED, the `measured` answers of vanilla in batches."""
        method, ids = cell.method, [self._ids(cell, prompt) for prompt in prompts]
        given = [measured.answer(cell, prompt) for prompt in prompts if method.kind == FORCED]
        sums = forced_acceptance(self.model, ids, given, method.tree_shape, method.drafter)
        room = self._room(cell)
        if prompts and method.kind != FORCED:  # forced rounds are not timed
            self._warm_up(cell, room)
        for number, prompt in enumerate(prompts):
            if method.kind == FORCED:
                tokens, figures = given[number], {"last_tokens": method.last_tokens} | next(sums)
            else:
                tokens, figures = self._generate(cell, room, ids[number], cell.prompt_seed(prompt["id"]))
            yield {
                **cell.key,
                "options": cell.options,
                "id": prompt["id"],
                "prompt": prompt_digest(prompt),
                "prompt_tokens": len(ids[number]),
                "new_tokens": len(tokens),
                "loops": loops(tokens),
                **figures,
                "token_ids": tokens,
            }

    def _room(self, cell: Cell) -> int:
        """Tokens of a row that has room for each prompt of a cell and its answer. Kernels are compiled for sizes."""
        longest = cell.context or max(len(self._ids(cell, prompt)) for prompt in cell.prompts)
        longest = min(longest, cell.method.last_tokens or longest)
        return min(longest + cell.max_new_tokens, position_limit(self.model.config))

    def _warm_up(self, cell: Cell, room: int) -> None:
        """Generate a few tokens without stopping at EOS, to compile kernels and measure rounds, unless that is done."""
        if (kernels := (cell.method.name, cell.temperature, room)) not in self.warmed_up:
            self.warmed_up.add(kernels)
            self._generate(cell, room, self._ids(cell, cell.prompts[0]), 0, warms_up=True)

    def _ids(self, cell: Cell, prompt: dict[str, Any]) -> list[int]:
        return shortened(self.text.prompt_ids(prompt), cell.method.last_tokens)

    def _generate(
        self, cell: Cell, room: int, ids: list[int], seed: int, warms_up: bool = False
    ) -> tuple[list[int], dict[str, Any]]:
        """The new tokens, which are those of `longspec.generate`, and figures of their decoding."""
        method, most, answer = cell.method, cell.max_new_tokens, list[int]()
        drafting = checked_drafting(self.model, drafting_of(method), False)
        tokens, eos_ids = (min(WARM_UP_TOKENS, most), ()) if warms_up else (most, end_tokens(self.model))
        sampling = cell.temperature, 1.0, 0
        requests = make_requests(self.model, [ids], [row_seed(seed, 0)], WITHOUT_FILE, eos_ids, tokens, *sampling)
        listener = Listener(lambda _, event: answer.extend(event.ids), in_blocks=True)
        stats = answer_all(self.model, drafting, requests, None, listener, longest=room)
        return answer, {name: getattr(stats, name) for name in FIGURES}
