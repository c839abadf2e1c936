"""A run: each rank writes its share of the shards, and rank 0 merges them into the split's file.

A split is SPLIT.jsonl with SPLIT.provenance.yaml next to it; its shards are in SPLIT.shards/.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from longspec.data.prompts import PromptFiles
from longspec.data.target_format import resolve_chat_format
from longspec.inference.load_pair import load_pair
from longspec.inference.registry import choose_target
from longspec.models.content import target_digest
from longspec.models.target_files import load_tokenizer, read_config
from longspec.ranks.replicas import LostRank, Replicas
from longspec.regenerate.settings import LATER, Settings, check_settings
from longspec.regenerate.shards import Shards
from longspec.regenerate.writer import Writer
from longspec.signals import StopSignals
from longspec.version import __version__

LIBRARIES = ("torch", "transformers")
"""Libraries whose versions are noted with the text."""


def regenerate(
    settings: Settings, dtype: str = "auto", device: str | None = None, replicas: Replicas | None = None
) -> Path | None:
    """Write this rank's share of the missing shards. Returns the split's file on rank 0, once all shards exist.

    replicas: those of the launch; None for a single process. Raises UserError for settings that cannot work, and for a
    folder with shards of other settings, and SystemExit if another rank has ended before.
    """
    replicas = replicas or Replicas()
    run = replicas.rank_zero_first(lambda: _prepare(settings, replicas))
    shards = run.shards
    replicas.from_rank_zero(lambda: shards.claim(run.facts))
    replicas.check_shared(shards.folder)
    replicas.together(lambda: shards.claim(run.facts))

    missing = replicas.from_rank_zero(
        lambda: [shard for shard in range(shards.count) if not shards.path(shard).exists()]
    )
    if missing:
        share = [missing[index] for index in replicas.share([run.load(shard) for shard in missing])]
        writer = replicas.together(lambda: run.writer(dtype, device))
        total = sum(len(shards.range(shard)) for shard in missing)
        with _progress_bar(settings.split, total, replicas) as bar:
            for shard in share:
                rows = shards.range(shard)
                records, dropped = writer.write_shard(shard, rows, bar.add)
                shards.write(shard, records, dropped)
                bar.end_shard(len(rows))
            if not replicas.meet(StopSignals(), bar.show):
                raise LostRank(replicas)
    return shards.merge() if replicas.rank == 0 else None


@dataclass
class _Run:
    """A run that has been checked. Only the weights are still to be loaded."""

    settings: Settings
    """The settings, with the chat format by name."""
    target: str
    """Folder or hub id."""
    tokenizer: Any
    files: PromptFiles | None
    """The prompts; None if the target writes the user turns."""
    facts: dict[str, Any]
    """Everything that determines the text, and versions."""
    shards: Shards

    def writer(self, dtype: str, device: str | None) -> Writer:
        """Load the weights."""
        model, _ = load_pair(self.target, self.settings.draft, dtype=dtype, device=device)
        return Writer(self.settings, model, self.tokenizer, self.files)

    def load(self, shard: int) -> int:
        """The work of a shard, to be balanced over ranks: the length of its prompts in bytes, and its new tokens."""
        rows = self.shards.range(shard)
        size = self.files.size(rows.start, rows.stop) if self.files else 0
        return size + len(rows) * self.settings.max_new_tokens


def _prepare(settings: Settings, replicas: Replicas) -> _Run:
    check_settings(settings)
    files = PromptFiles(settings.files) if settings.files else None
    target = choose_target(settings.target)
    config = read_config(target)
    tokenizer = load_tokenizer(target, config, settings.chat_template_kwargs)
    report = print if replicas.rank == 0 else lambda line: None
    chat_format = resolve_chat_format(settings.chat_format, target, config.model_type, tokenizer, report)
    settings = replace(settings, chat_format=chat_format)
    facts = _facts(settings, files, target_digest(target, config))
    return _Run(settings, target, tokenizer, files, facts, Shards(settings, _total(settings, files)))


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
    defaults = {field.name: field.default for field in fields(Settings)}
    for name in ("chat_template_kwargs", *LATER):
        if getattr(settings, name) == defaults[name]:
            del facts[name]  # folders of earlier versions lack this key
    facts["target_digest"] = digest
    facts["files"] = files.digests if files else {}
    facts["versions"] = {"longspec": __version__} | {name: version(name) for name in LIBRARIES}
    return facts


class _ProgressBar:
    """Counts finished prompts and shows new tokens per second, over all ranks."""

    def __init__(self, bar: tqdm, replicas: Replicas) -> None:
        self.bar = bar
        self.replicas = replicas
        self.start = time.perf_counter()
        self.answers = 0
        """Number of finished answers of the running shard."""

    def add(self, new_tokens: int, answers: int) -> None:
        """Count new tokens and finished answers."""
        self.answers += answers
        self._count(new_tokens, answers)

    def end_shard(self, prompts: int) -> None:
        """Count the prompts of a shard that were dropped without an answer."""
        self._count(0, prompts - self.answers)
        self.answers = 0

    def show(self) -> None:
        """Show the progress of the other ranks."""
        self._count(0, 0)

    def _count(self, new_tokens: int, prompts: int) -> None:
        speed = self.replicas.count("tokens", new_tokens) / (time.perf_counter() - self.start)
        self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update(self.replicas.count("prompts", prompts) - self.bar.n)


@contextmanager
def _progress_bar(label: str, total: int, replicas: Replicas) -> Iterator[_ProgressBar]:
    with tqdm(total=total, desc=label, unit="prompt", disable=replicas.rank > 0) as bar:
        yield _ProgressBar(bar, replicas)
