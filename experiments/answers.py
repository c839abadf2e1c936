"""Step `regenerate`: the target answers the prompts for training and validation."""

import zlib
from pathlib import Path

from experiments.prompts import SHARD_BATCHES, answers_file, prompts_file
from experiments.settings import Settings
from experiments.target import CHAT_FORMAT
from longspec.inference.regenerate import Settings as AnswerRun
from longspec.inference.regenerate import regenerate


def write_answers(settings: Settings, root: Path) -> None:
    """Every run of the target that is missing, shard by shard; loops and duplicates are dropped there."""
    for name, answers in settings.answers.items():
        for split in ("train", "validation"):
            groups = [prompts_file(root, split, group) for group in answers.prompts]
            files = tuple(str(file) for file in groups if file.exists() and file.stat().st_size)
            if not files:
                print(f"regenerate, {split}, {name}: no prompts, left out")
                continue
            if answers_file(root, name, split).exists():
                continue
            run = AnswerRun(
                target=settings.target,
                output_dir=str(answers_file(root, name, split).parent),
                split=split,
                files=files,
                temperatures=tuple(answers.temperatures) if split == "train" else (0.0,),
                max_new_tokens=answers.max_new_tokens,
                batch_size=answers.batch_size,
                shard_size=SHARD_BATCHES * answers.batch_size,
                seed=zlib.crc32(f"{settings.seed}/{name}".encode()),  # two runs may answer the same prompts
                chat_format=CHAT_FORMAT,
            )
            path = regenerate(run)
            print(f"regenerate, {split}, {name}: {path}")
