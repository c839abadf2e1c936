"""Text written by the target: short conversations, and the answers to prompts."""

import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from longspec.inference.load_pair import load_pair
from longspec.pipeline.files import answers_file, claim, prompts_file
from longspec.pipeline.processes import share_work
from longspec.pipeline.settings import AnswerSettings, ChatSettings, Settings
from longspec.pipeline.target import CHAT_FORMAT
from longspec.ranks.replicas import Replicas
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import SPLITS
from longspec.regenerate.settings import Settings as AnswerRun

CHAT = "chat"
"""Name of the run that writes the conversations."""
SHARD_BATCHES = 2
"""Batches per shard; an interrupted run resumes after its last complete shard, and ranks share the shards."""


def write_text(names: Sequence[str], settings: Settings, root: Path) -> None:
    """Write the text of some runs, CHAT or keys of `settings.answers`, on all GPUs. Raises UserError."""
    for count, group in groupby(names, key=lambda name: _settings_of(name, settings).processes):
        own = list(group)
        for run in _runs(own, settings, root):
            facts = asdict(run)
            del facts["output_dir"]
            claim(_output(run).with_suffix(".settings.json"), facts)
        if text_is_written(own, settings, root):
            continue
        shared = settings.tp_size > 1
        ranks = settings.tp_size if shared else count * torch.cuda.device_count() or 1  # one on a CPU
        share_work(write_share, settings, root, ranks, *own)


def text_is_written(names: Sequence[str], settings: Settings, root: Path) -> bool:
    """Whether the text of some runs exists, for the prompts that exist."""
    return all(_output(run).exists() for run in _runs(names, settings, root))


def write_share(settings: Settings, root: Path, replicas: Replicas, *names: str) -> None:
    """Write this process's share of some runs, as far as their files do not exist. Duplicates are dropped."""
    load = cache(load_pair)
    # Several ranks may have the same GPU. Ranks that share a target have chosen theirs.
    devices = torch.cuda.device_count() if replicas.size > 1 else 0
    device = f"cuda:{replicas.rank % devices}" if devices else None
    for run in _runs(names, settings, root):
        if not replicas.from_rank_zero(_output(run).exists):
            written = regenerate(run, device=device, replicas=replicas, load=load)
            if written is not None:
                print(f"written: {written}", flush=True)


def _settings_of(name: str, settings: Settings) -> ChatSettings | AnswerSettings:
    return settings.chat if name == CHAT else settings.answers[name]


def _output(run: AnswerRun) -> Path:
    return Path(run.output_dir) / f"{run.split}.jsonl"


def _runs(names: Sequence[str], settings: Settings, root: Path) -> list[AnswerRun]:
    """The runs of some names, of each split that has something to write."""
    runs = [_run(name, split, settings, root) for name in names for split in SPLITS]
    return [run for run in runs if run is not None]


def _run(name: str, split: str, settings: Settings, root: Path) -> AnswerRun | None:
    """The run that writes the conversations, or the answers to the prompts of some groups; None if there are none."""
    own = _settings_of(name, settings)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    content: dict[str, Any]
    if isinstance(own, ChatSettings):
        count = getattr(own, split)
        # Splits share no user turn.
        others = [other for other in SPLITS[: SPLITS.index(split)] if getattr(own, other)]
        content = {"count": count, "max_turn_tokens": own.max_turn_tokens, "seed": settings.seed}
        content["exclude"] = tuple(str(answers_file(root, CHAT, other)) for other in others)
    else:
        groups = [prompts_file(root, split, group) for group in own.prompts]
        files = tuple(str(file) for file in groups if file.exists() and file.stat().st_size)
        count, temperatures = 0 if split == "test" else len(files), tuple(own.temperatures)
        # A seed per name, as two may share prompts.
        content = {"files": files, "seed": zlib.crc32(f"{settings.seed}/{name}".encode())}
    if not count:
        return None
    return AnswerRun(
        target=settings.target,
        output_dir=str(root / "answers" / name),
        split=split,
        temperatures=temperatures if split == "train" else (0.0,),
        max_new_tokens=own.max_new_tokens,
        batch_size=own.batch_size,
        shard_size=SHARD_BATCHES * own.batch_size,
        chat_format=CHAT_FORMAT,
        **content,
    )
