"""A run: each rank writes its share of the shards, and rank 0 merges them into the split's file.

A split is SPLIT.jsonl with SPLIT.provenance.yaml next to it; its shards are in SPLIT.shards/.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from longspec.data.prompts import PromptFiles
from longspec.data.record_fields import unread_note
from longspec.data.target_format import resolve_chat_format
from longspec.errors import UserError
from longspec.inference.device import versions
from longspec.inference.load_pair import load_pair, read_target
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.options import report_ignored
from longspec.inference.registry import choose_pair, draft_in_use
from longspec.jobs.job import Count, ResumableJob, agree
from longspec.models.content import state_digest, target_digest
from longspec.models.draft_files import load_draft
from longspec.models.target_files import position_limit, read_generation_config
from longspec.ranks.replicas import Replicas
from longspec.regenerate.settings import Settings, check_settings, longest_prompt
from longspec.regenerate.shards import SplitShards, prompt_keys, shard_size
from longspec.regenerate.writer import Writer
from longspec.signals import StopSignals

BATCHES = 16
"""Largest number of batches that one call of the engine answers."""


def regenerate(
    settings: Settings,
    dtype: str = "auto",
    device: str | None = None,
    replicas: Replicas | None = None,
    load: Callable[..., Any] = load_pair,
) -> Path | None:
    """Write this rank's share of the missing shards. Returns the split's file on rank 0, once all shards exist.

    replicas: those of the launch; None for a single process. load: reads the target; several runs of a process can
    share a cached `load_pair`. Raises UserError for settings that cannot work, and for a folder with shards of other
    settings, and SystemExit if another rank has ended before.
    """
    replicas = replicas or Replicas()
    load_weights = partial(load, dtype=dtype, device=device)
    shards, files, make_writer = replicas.rank_zero_first(lambda: _prepare(settings, replicas, load_weights))

    def work(shard: int) -> int:
        """To be balanced over ranks: the length of a shard's prompts in bytes, and its new tokens."""
        rows = shards.range(shard)
        return (files.size(rows.start, rows.stop) if files else 0) + len(rows) * settings.max_new_tokens

    with ExitStack() as stack:

        def claim() -> list[int]:
            stack.enter_context(shards.claimed())
            return shards.missing()

        if missing := agree(claim, shards.identity, shards.folder, replicas):
            writer = replicas.together(make_writer)
            done = shards.total - sum(len(shards.range(shard)) for shard in missing)
            # A stop signal ends the process at once.
            job = ResumableJob(shards.total, "prompt", shards.output, StopSignals(), replicas)
            job.run(missing, work, partial(_write_shards, writer, shards), done, settings.split)
        return shards.merge() if replicas.rank == 0 else None


def _write_shards(writer: Writer, shards: SplitShards, own: Iterator[int], count: Count) -> None:
    # The last answers of a call leave most rows idle, so that a call has many batches.
    most = max(1, BATCHES * writer.settings.batch_size // writer.settings.shard_size)
    while group := {shard: shards.range(shard) for shard in islice(own, most)}:
        writer.write_shards(group, shards.write, count)


def _prepare(
    settings: Settings, replicas: Replicas, load: Callable[..., Any]
) -> tuple[SplitShards, PromptFiles | None, Callable[[], Writer]]:
    """The shards of a run that has been checked, its prompts, if any, and a function that loads the weights."""
    check_settings(settings)
    report = print if replicas.rank == 0 else lambda line: None
    files = PromptFiles(settings.files) if settings.files else None
    named = choose_pair(settings.target, settings.draft)
    pair, config, tokenizer = read_target(named, settings.chat_template_kwargs)
    target, draft = pair.target, draft_in_use(pair, settings.method, settings.draft)
    chat_format = resolve_chat_format(settings.chat_format, target, config.model_type, tokenizer, report)
    report_ignored(read_generation_config(target, config), target, (), report)
    # Checked before any work; used later.
    settings.penalties(tokenizer, config.vocab_size)
    longest_prompt(settings, position_limit(config))
    prompt_keys(settings.exclude)
    total = min(settings.count or len(files), len(files)) if files else settings.count
    settings = replace(settings, chat_format=chat_format, shard_size=settings.shard_size or shard_size(total))
    if files and files.unread:
        report(unread_note(files.unread))
    if files and replicas.rank == 0:
        _check_prompts(files, total, settings, config.model_type, tokenizer)

    # As YAML will store it: tuples become lists.
    facts = json.loads(json.dumps(asdict(settings)))
    del facts["output_dir"]
    facts["target_digest"] = target_digest(target, config)
    if draft is not None and settings.method in (*GLIDE_METHODS, AUTO):
        # The path may later hold another draft, whose trees draw other random numbers.
        facts["draft_digest"] = state_digest(load_draft(draft))
    facts["files"] = files.digests if files else {}
    facts["versions"] = versions()
    shards = SplitShards(settings, total, facts)
    return shards, files, lambda: Writer(settings, load(target, draft)[0], tokenizer, files)


def _check_prompts(files: PromptFiles, total: int, settings: Settings, family: str, tokenizer: Any) -> None:
    """Print a line on the prompts that the chat template rejects. Raises UserError if it rejects all."""
    rejected: list[str] = []
    kept = sum(1 for _ in files.read(0, total, family, tokenizer, settings.chat_format, rejected))
    if rejected:
        line = f"{len(rejected)} of {kept + len(rejected)} prompts left out; the first one: {rejected[0]}"
        if not kept:
            raise UserError(f"{line}; no prompt is left")
        print(line)
