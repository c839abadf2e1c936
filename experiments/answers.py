"""Text written by the target: short conversations, and the answers to prompts (step `regenerate`)."""

import zlib
from dataclasses import asdict
from pathlib import Path

from experiments.files import answers_file, claim, prompts_file
from experiments.settings import Settings
from experiments.sources import SPLITS
from experiments.target import CHAT_FORMAT
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import Settings as AnswerRun

SHARD_BATCHES = 2
"""Batches per shard; an interrupted run resumes after its last complete shard."""


def write_chat(settings: Settings, root: Path) -> None:
    """Generate conversations of a user turn and an answer, both by the target. Splits share no user turn."""
    chat = settings.chat
    written: list[str] = []
    for split in SPLITS:
        if not (count := getattr(chat, split)):
            continue
        run = AnswerRun(
            target=settings.target,
            output_dir=str(root / "answers" / "chat"),
            split=split,
            count=count,
            temperatures=(0.0, 0.7, 1.0) if split == "train" else (0.0,),
            max_new_tokens=chat.max_new_tokens,
            max_turn_tokens=chat.max_turn_tokens,
            batch_size=chat.batch_size,
            shard_size=SHARD_BATCHES * chat.batch_size,
            seed=settings.seed,
            chat_format=CHAT_FORMAT,
            exclude=tuple(written),
        )
        written.append(str(answers_file(root, "chat", split)))
        _run_target(run)


def write_answers(settings: Settings, root: Path) -> None:
    """Generate the target's answers to all prompts for training and validation."""
    for name, answers in settings.answers.items():
        for split in ("train", "validation"):
            groups = [prompts_file(root, split, group) for group in answers.prompts]
            files = tuple(str(file) for file in groups if file.exists() and file.stat().st_size)
            if not files:
                print(f"regenerate, {split}, {name}: skipped, no prompts")
                continue
            run = AnswerRun(
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
            _run_target(run)


def _run_target(run: AnswerRun) -> None:
    """Write the answers shard by shard unless the file exists. Repetition loops and duplicates are dropped."""
    output = Path(run.output_dir) / f"{run.split}.jsonl"
    facts = asdict(run)
    del facts["output_dir"]
    claim(output.with_suffix(".settings.json"), facts)
    if not output.exists():
        regenerate(run)
        print(f"regenerate: wrote {output}")
