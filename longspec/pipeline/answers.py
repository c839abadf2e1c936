"""Text written by the target: short conversations, and the answers to prompts."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from longspec.inference.load_pair import load_pair
from longspec.pipeline.files import answers_file, claim, prompts_file
from longspec.pipeline.processes import share_work
from longspec.pipeline.settings import AnswerSettings, Settings
from longspec.pipeline.sources import SPLITS
from longspec.pipeline.target import CHAT_FORMAT
from longspec.ranks.replicas import Replicas
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import Settings as AnswerRun

CHAT = "chat"
"""Name of the run that writes the conversations."""
SHARD_BATCHES = 2
"""Batches per shard; an interrupted run resumes after its last complete shard, and ranks share the shards."""


def write_text(names: Sequence[str], settings: Settings, root: Path) -> None:
    """Write the text of some runs of the target, on all GPUs: CHAT, or keys of `settings.answers`.

    Raises UserError if a process fails.
    """
    for count, group in groupby(names, key=lambda name: _processes(name, settings)):
        own = list(group)
        if all(_output(run).exists() for name in own for run in _runs(name, settings, root)):
            write_share(settings, root, Replicas(), *own)  # compares the settings only
            continue
        shared = settings.tp_size > 1
        ranks = settings.tp_size if shared else count * max(1, torch.cuda.device_count())
        share_work(write_share, settings, root, ranks, *own)


def _processes(name: str, settings: Settings) -> int:
    """Processes per GPU of a run."""
    return settings.chat.processes if name == CHAT else settings.answers[name].processes


def write_share(settings: Settings, root: Path, replicas: Replicas, *names: str) -> None:
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
    # Several ranks may have the same GPU. Ranks that share a target have chosen theirs.
    devices = torch.cuda.device_count() if replicas.size > 1 else 0
    regenerate(run, device=f"cuda:{replicas.rank % devices}" if devices else None, replicas=replicas, load=load)
    if replicas.rank == 0:
        print(f"written: {output}", flush=True)
