"""A run: each rank writes its share of the shards, and the last one to finish merges them into the split's file.

A split is SPLIT.jsonl with SPLIT.provenance.yaml next to it; its shards are in SPLIT.shards/.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longspec import __version__
from longspec.data.prompts import PromptFiles
from longspec.data.target_format import resolve_chat_format
from longspec.inference.load_pair import load_pair
from longspec.inference.registry import choose_target
from longspec.models.content import target_digest
from longspec.models.target_files import load_tokenizer, read_config
from longspec.regenerate.settings import Settings, check_settings
from longspec.regenerate.shards import Shards
from longspec.regenerate.writer import Writer

LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are noted with the text."""


def regenerate(
    settings: Settings, dtype: str = "auto", device: str | None = None, rank: int = 0, world: int = 1
) -> Path | None:
    """Write the missing shards of this rank. Returns the split's file once the shards of all ranks exist, else None.

    Raises UserError for settings that cannot work, and for a folder with shards of other settings.
    """
    check_settings(settings)
    files = PromptFiles(settings.files) if settings.files else None
    target = choose_target(settings.target)
    config = read_config(target)
    tokenizer = load_tokenizer(target, config, settings.chat_template_kwargs)
    report = print if rank == 0 else lambda line: None
    chat_format = resolve_chat_format(settings.chat_format, target, config.model_type, tokenizer, report)
    settings = replace(settings, chat_format=chat_format)

    shards = Shards(settings, _total(settings, files))
    shards.claim(_facts(settings, files, target_digest(target, config)))
    # Ranks share nothing but the folder: each takes every `world`-th shard.
    own_shards = range(rank, shards.count, world)
    missing = [shard for shard in own_shards if not shards.path(shard).exists()]
    # A finished rank does not load the target only to merge.
    if missing:
        model, _ = load_pair(target, dtype=dtype, device=device)
        writer = Writer(settings, model, tokenizer, files)
        total = sum(len(shards.range(shard)) for shard in missing)
        with _progress_bar(f"{settings.split}, rank {rank}", total, shown=rank == 0) as bar:
            for shard in missing:
                rows = shards.range(shard)
                records, dropped = writer.write_shard(shard, rows, bar.add)
                shards.write(shard, records, dropped)
                bar.end_shard(len(rows))
    return shards.merge()


def _total(settings: Settings, files: PromptFiles | None) -> int:
    """The number of prompts in all shards."""
    if files is None:
        return settings.count
    return min(settings.count or len(files), len(files))


def _facts(settings: Settings, files: PromptFiles | None, digest: str) -> dict[str, Any]:
    """Everything that determines the text of a run, and the versions of the libraries. digest: the target's."""
    # As YAML will store it: tuples become lists.
    facts = json.loads(json.dumps(asdict(settings)))
    del facts["output_dir"]
    if not settings.chat_template_kwargs:
        del facts["chat_template_kwargs"]  # Folders of earlier versions lack this key.
    facts["target_digest"] = digest
    facts["files"] = files.digests if files else {}
    facts["versions"] = {"longspec": __version__} | {name: version(name) for name in LIBRARIES}
    return facts


class _ProgressBar:
    """Counts finished prompts and shows new tokens per second."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar
        self.start = time.perf_counter()
        self.new_tokens = 0
        self.ended = 0
        """Number of prompts in the shards that have ended."""

    def add(self, new_tokens: int, answers: int) -> None:
        """Count new tokens and finished answers."""
        self.new_tokens += new_tokens
        # Over the whole run, because answers of a batch end in bursts.
        speed = self.new_tokens / (time.perf_counter() - self.start)
        self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update(answers)

    def end_shard(self, prompts: int) -> None:
        """Count the prompts of a shard that were dropped without an answer."""
        self.ended += prompts
        self.bar.update(self.ended - self.bar.n)


@contextmanager
def _progress_bar(label: str, total: int, shown: bool) -> Iterator[_ProgressBar]:
    with tqdm(total=total, desc=label, unit="prompt", disable=not shown) as bar:
        yield _ProgressBar(bar)
