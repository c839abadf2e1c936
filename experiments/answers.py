"""Text written by the target: short conversations, and the answers to prompts (step `regenerate`)."""

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from experiments.files import answers_file, claim, prompts_file
from experiments.processes import free_port, running
from experiments.settings import AnswerSettings, Settings
from experiments.sources import SPLITS
from experiments.target import CHAT_FORMAT
from longspec.errors import UserError
from longspec.inference.load_pair import load_pair
from longspec.ranks.replicas import Replicas, joined_replicas
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import Settings as AnswerRun

CHAT = "chat"
"""Name of the run that writes the conversations."""
SHARD_BATCHES = 2
"""Batches per shard; an interrupted run resumes after its last complete shard, and ranks share the shards."""


def write_chat(settings: Settings, root: Path, options: Sequence[str], part: str | None = None) -> None:
    """Generate conversations of a user turn and an answer, both by the target, on all GPUs. See `write_answers`."""
    _write({CHAT: settings.chat.processes}, "prompts", settings, root, options, part)


def write_answers(settings: Settings, root: Path, options: Sequence[str], part: str | None = None) -> None:
    """Generate the target's answers to all prompts for training and validation, on all GPUs.

    options: those of the command, for the processes that are started. part: the runs that such a process shares with
    others, separated by commas. Raises UserError if a process fails.
    """
    processes = {name: answers.processes for name, answers in settings.answers.items()}
    _write(processes, "regenerate", settings, root, options, part)


def _write(
    processes: dict[str, int], step: str, settings: Settings, root: Path, options: Sequence[str], part: str | None
) -> None:
    """Write the text of some runs. processes: number of processes per GPU, by name of the run."""
    if part is not None:
        with joined_replicas() as replicas:
            return _write_share(part.split(","), settings, root, replicas)
    for count, group in groupby(processes, key=processes.__getitem__):
        names = list(group)
        ranks = count * max(1, torch.cuda.device_count())
        runs = [run for name in names for run in _runs(name, settings, root)]
        if ranks == 1 or all(_output(run).exists() for run in runs):
            _write_share(names, settings, root, Replicas())
            continue
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
        own = ["-m", "experiments", step, "--part", ",".join(names), *options]
        with running([sys.executable, *launcher, *own]) as child:
            if code := child.wait():
                raise UserError(f"{step}: {', '.join(names)}: a process ended with code {code}")


def _write_share(names: Sequence[str], settings: Settings, root: Path, replicas: Replicas) -> None:
    """Write this process's share of some runs."""
    load = cache(load_pair)
    for name in names:
        for run in _runs(name, settings, root):
            _run_target(run, replicas, load)


def _runs(name: str, settings: Settings, root: Path) -> list[AnswerRun]:
    """A run of each split that has something to write."""
    make = partial(_chat_run, settings, root) if name == CHAT else partial(_answer_run, settings, root, name)
    return [run for split in SPLITS if (run := make(split)) is not None]


def _output(run: AnswerRun) -> Path:
    return Path(run.output_dir) / f"{run.split}.jsonl"


def _chat_run(settings: Settings, root: Path, split: str) -> AnswerRun | None:
    """The run that writes a split's conversations. Splits share no user turn."""
    chat = settings.chat
    others = SPLITS[: SPLITS.index(split)]
    if not (count := getattr(chat, split)):
        return None
    return AnswerRun(
        target=settings.target,
        output_dir=str(root / "answers" / CHAT),
        split=split,
        count=count,
        temperatures=(0.0, 0.7, 1.0) if split == "train" else (0.0,),
        max_new_tokens=chat.max_new_tokens,
        max_turn_tokens=chat.max_turn_tokens,
        batch_size=chat.batch_size,
        shard_size=SHARD_BATCHES * chat.batch_size,
        seed=settings.seed,
        chat_format=CHAT_FORMAT,
        exclude=tuple(str(answers_file(root, CHAT, other)) for other in others if getattr(chat, other)),
    )


def _answer_run(settings: Settings, root: Path, name: str, split: str) -> AnswerRun | None:
    """The run that answers the prompts of some groups; None for the test and without prompts."""
    answers: AnswerSettings = settings.answers[name]
    groups = [prompts_file(root, split, group) for group in answers.prompts]
    files = tuple(str(file) for file in groups if file.exists() and file.stat().st_size)
    if split == "test" or not files:
        return None
    return AnswerRun(
        target=settings.target,
        output_dir=str(root / "answers" / name),
        split=split,
        files=files,
        temperatures=tuple(answers.temperatures) if split == "train" else (0.0,),
        max_new_tokens=answers.max_new_tokens,
        batch_size=answers.batch_size,
        shard_size=SHARD_BATCHES * answers.batch_size,
        seed=zlib.crc32(f"{settings.seed}/{name}".encode()),  # a seed per name, as two may share prompts
        chat_format=CHAT_FORMAT,
    )


def _run_target(run: AnswerRun, replicas: Replicas, load: Callable[..., Any]) -> None:
    """Write the answers shard by shard unless the file exists. Repetition loops and duplicates are dropped."""
    output = _output(run)
    facts = asdict(run)
    del facts["output_dir"]
    replicas.from_rank_zero(lambda: claim(output.with_suffix(".settings.json"), facts))
    if replicas.from_rank_zero(output.exists):
        return
    devices = torch.cuda.device_count()
    regenerate(run, device=f"cuda:{replicas.rank % devices}" if devices else None, replicas=replicas, load=load)
    if replicas.rank == 0:
        print(f"regenerate: wrote {output}", flush=True)
