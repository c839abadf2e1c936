"""Training text written by the target: it answers prompts, shard by shard, and can write the user turns as well.

A split is written as SPLIT.jsonl, with SPLIT.provenance.yaml next to it, once all shards of SPLIT.shards/ exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from longspec import __version__
from longspec.data.prompts import (
    Prompt,
    PromptFiles,
    answered,
    conversation_text,
    loops,
    prompt_key,
    user_turn_marks,
)
from longspec.data.records import Record, data_files, parse_record
from longspec.data.target_format import AUTO, resolve_chat_format
from longspec.data.templates import encode_texts
from longspec.errors import UserError
from longspec.inference.answering import Answerer, Progress, Request
from longspec.inference.arguments import check_sampling, end_tokens
from longspec.inference.load_pair import load_pair
from longspec.inference.registry import PAIRS, choose_pair
from longspec.models.content import target_digest
from longspec.models.target_files import context_window, load_tokenizer, read_config
from longspec.untrusted import read_yaml

SPLITS = ("train", "validation", "test")
TURN_TEMPERATURE = 1.0
"""Of user turns that the target writes."""
LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True)
class Settings:
    """What a run writes; the same settings always give the same files on the same kind of device."""

    target: str
    """A name that `load_pair` takes, a folder, a hub id or a GGUF file."""
    output_dir: str
    split: str = "train"
    """One of SPLITS; each has its own random numbers."""
    files: tuple[str, ...] = ()
    """JSONL files, folders or patterns with prompts; without any, the target writes the user turns."""
    count: int = 0
    """Prompts of all shards; with files, their first `count` records, 0 for all."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Each answer draws its temperature from these."""
    max_new_tokens: int = 512
    max_prompt_tokens: int = 0
    """Longer prompts are left out; 0 is all that leave room for max_new_tokens."""
    max_turn_tokens: int = 256
    """Longer user turns of the target's own are left out."""
    batch_size: int = 256
    shard_size: int = 2048
    seed: int = 0
    chat_format: str = AUTO
    chat_template_kwargs: str | None = None
    """Variables of the tokenizer's chat template, as a JSON object."""
    exclude: tuple[str, ...] = ()
    """Outputs of other splits, whose prompts are left out."""


def regenerate(
    settings: Settings, dtype: str = "auto", device: str | None = None, rank: int = 0, world: int = 1
) -> Path | None:
    """Write the shards of this rank that are missing; the split's file once all ranks' shards are there, else None.

    Raises UserError for settings that cannot work, and for a folder with shards of other settings.
    """
    _check(settings)
    files = PromptFiles(settings.files) if settings.files else None
    total = min(settings.count or len(files), len(files)) if files else settings.count
    target = choose_target(settings.target)
    config = read_config(target)
    tokenizer = load_tokenizer(target, config, settings.chat_template_kwargs)
    say = print if rank == 0 else lambda line: None
    chat_format = resolve_chat_format(settings.chat_format, target, config.model_type, tokenizer, say)
    settings = replace(settings, chat_format=chat_format)
    shards = Shards(settings, total)
    shards.claim(_facts(settings, files, target_digest(target, config)))
    missing = [number for number in range(shards.count) if number % world == rank and not shards.path(number).exists()]
    if missing:
        model, _ = load_pair(target, dtype=dtype, device=device)
        writer = Writer(settings, model, tokenizer, files)
        with _bar(settings, sum(len(shards.range(number)) for number in missing), rank) as (progress, finish):
            for number in missing:
                records, dropped = writer.shard(number, shards.range(number), progress)
                shards.write(number, records, dropped)
                finish(len(shards.range(number)))
    return shards.merge()


def choose_target(name: str) -> str:
    """The folder or hub id of a target by name or path."""
    return (choose_pair(name, None, None) if name in PAIRS else choose_pair(None, name, None)).target


class Writer:
    """Makes the records of a shard."""

    def __init__(self, settings: Settings, model: Any, tokenizer: Any, files: PromptFiles | None) -> None:
        self.settings, self.tokenizer, self.files = settings, tokenizer, files
        self.family = model.config.model_type
        self.answerer = Answerer(model, settings.batch_size)
        self.ends = sorted(end_tokens(model.generation_config.eos_token_id))
        window = context_window(model.config)
        self.longest = settings.max_prompt_tokens or window - settings.max_new_tokens
        if self.longest + settings.max_new_tokens > window or self.longest < 1:
            raise UserError(
                f"max_prompt_tokens {self.longest} + max_new_tokens {settings.max_new_tokens}: "
                f"the target has {window} positions"
            )
        if files is None:
            before, after = user_turn_marks(tokenizer)
            self.opening = encode_texts([before], tokenizer)[0]
            self.turn_ends = [*self.ends, tokenizer(after, add_special_tokens=False)["input_ids"][0]]

    def shard(self, number: int, rows: range, progress: Progress) -> tuple[list[Record], Counter[str]]:
        """The records of a shard, and how many prompts or answers were dropped for what."""
        dropped: Counter[str] = Counter()
        if self.files is None:
            prompts = self._write_turns(number, rows, dropped, progress)
        else:
            prompts = self.files.read(rows.start, rows.stop, self.family, self.tokenizer, self.settings.chat_format)
        return self._answer(number, prompts, dropped, progress), dropped

    def _write_turns(self, number: int, rows: range, dropped: Counter[str], progress: Progress) -> list[Prompt]:
        requests = [Request(self.opening, TURN_TEMPERATURE, self.settings.max_turn_tokens, []) for _ in rows]
        seed = shard_seed(self.settings, number, "turns")
        self.answerer.answer(requests, self.turn_ends, seed, lambda tokens, finished: progress(tokens, 0))
        prompts = []
        for row, request in zip(rows, requests, strict=True):
            if fault := self._fault(request, self.turn_ends, cut_off=True):
                dropped[f"user turns: {fault}"] += 1
                continue
            turn = self._text(request, self.turn_ends)
            turns: Any = [{"role": "user", "content": turn}]
            text = conversation_text(turns, self.family, self.tokenizer, self.settings.chat_format)
            prompts.append(Prompt(f"{self.settings.split}-{row}", turns, text))
        return prompts

    def _answer(self, number: int, prompts: list[Prompt], dropped: Counter[str], progress: Progress) -> list[Record]:
        choice = random.Random(shard_seed(self.settings, number, "temperatures"))
        temperatures = [choice.choice(self.settings.temperatures) for _ in prompts]
        ids = encode_texts([prompt.text for prompt in prompts], self.tokenizer)
        kept = [row for row, prompt_ids in enumerate(ids) if 0 < len(prompt_ids) <= self.longest]
        dropped["prompts: too long or empty"] += len(prompts) - len(kept)
        requests = [Request(ids[row], temperatures[row], self.settings.max_new_tokens, []) for row in kept]
        self.answerer.answer(requests, self.ends, shard_seed(self.settings, number, "answers"), progress)
        records = []
        for row, request in zip(kept, requests, strict=True):
            if fault := self._fault(request, self.ends):
                dropped[f"answers: {fault}"] += 1
                continue
            records.append(
                answered(
                    prompts[row],
                    self._text(request, self.ends),
                    temperature=request.temperature,
                    finished=request.answer[-1] in self.ends,
                    new_tokens=len(request.answer),
                )
            )
        return records

    def _fault(self, request: Request, ends: list[int], cut_off: bool = False) -> str | None:
        """Why a text is not used. cut_off: whether one that reached its limit is not."""
        special = set(self.tokenizer.all_special_ids) - set(ends)
        if cut_off and request.answer[-1] not in ends:
            return "cut off"
        if special & set(request.answer):
            return "special tokens"
        if loops(request.answer):
            return "loops"
        return None if self._text(request, ends) else "empty"

    def _text(self, request: Request, ends: list[int]) -> str:
        tokens = request.answer[:-1] if request.answer[-1] in ends else request.answer
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\ufffd") if text.strip() else ""  # a cut-off text may end inside a character


class Shards:
    """The shards of a split on disk."""

    def __init__(self, settings: Settings, total: int) -> None:
        self.settings, self.total = settings, total
        self.count = -(-total // settings.shard_size)
        self.folder = Path(settings.output_dir) / f"{settings.split}.shards"
        self.output = Path(settings.output_dir) / f"{settings.split}.jsonl"

    def range(self, number: int) -> range:
        """The prompts of a shard."""
        size = self.settings.shard_size
        return range(number * size, min((number + 1) * size, self.total))

    def path(self, number: int) -> Path:
        # Without a suffix: a folder given as training data is searched for .json and .jsonl files.
        return self.folder / f"shard-{number:05d}-of-{self.count:05d}"

    def claim(self, facts: dict[str, Any]) -> None:
        """Keep the facts of the run with its shards. Raises UserError if the folder has shards of another run."""
        file = self.folder / "provenance.yaml"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if file.exists():
                _compare(file, _read_facts(file), facts)
            else:
                _write(file, yaml.safe_dump(facts, sort_keys=False))
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written ({error.strerror})") from error

    def write(self, number: int, records: list[Record], dropped: Counter[str]) -> None:
        lines = [{"dropped": dict(dropped)}, *records]
        _write(self.path(number), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def merge(self) -> Path | None:
        """Write the split's file without duplicate or excluded prompts; None while shards are missing."""
        if not all(self.path(number).exists() for number in range(self.count)):
            return None
        seen, dropped, lines, tokens = _keys(self.settings.exclude), Counter[str](), [], 0
        for number in range(self.count):
            first, *records = map(json.loads, self.path(number).read_bytes().splitlines())
            dropped.update(first["dropped"])
            for row, record in enumerate(records):
                if (key := prompt_key(record)) in seen:
                    dropped["prompts: duplicates or excluded"] += 1
                    continue
                seen.add(key)
                tokens += record["new_tokens"]
                named = {"id": f"{self.settings.split}-{number:05d}-{row:05d}", **record}
                lines.append(json.dumps(named, ensure_ascii=False) + "\n")
        if not lines:
            raise UserError(f"{self.folder}: no answer is left ({dict(dropped)})")
        facts = _read_facts(self.folder / "provenance.yaml")
        facts |= {"records": len(lines), "new_tokens": tokens, "dropped": dict(sorted(dropped.items()))}
        _write(self.output.with_suffix(".provenance.yaml"), yaml.safe_dump(facts, sort_keys=False))
        _write(self.output, "".join(lines))
        return self.output


def shard_seed(settings: Settings, number: int, use: str) -> int:
    """The seed of a shard for one use; no two splits, shards or uses share one."""
    name = f"{settings.seed}/{settings.split}/{number}/{use}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _check(settings: Settings) -> None:
    if settings.split not in SPLITS:
        raise UserError(f"split: {settings.split!r}; use one of {', '.join(SPLITS)}")
    if not settings.files and settings.count < 1:
        raise UserError("count: the number of prompts that the target shall write; or give files with prompts")
    if not settings.temperatures:
        raise UserError("temperatures: none; give numbers of 0 (greedy) or more")
    for temperature in settings.temperatures:
        check_sampling(settings.max_new_tokens, temperature, 1.0, 0)
    for name in ("max_turn_tokens", "batch_size", "shard_size"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name}: {getattr(settings, name)}; it must be at least 1")
    for name in ("count", "max_prompt_tokens", "seed"):
        if getattr(settings, name) < 0:
            raise UserError(f"{name}: {getattr(settings, name)}; it must not be negative")


def _facts(settings: Settings, files: PromptFiles | None, target: str) -> dict[str, Any]:
    """What decides about the text of a run, and the versions of the libraries. target: its digest."""
    facts = json.loads(json.dumps(asdict(settings)))
    del facts["output_dir"]
    if not settings.chat_template_kwargs:
        del facts["chat_template_kwargs"]  # folders of earlier versions have none
    facts["target_digest"] = target
    facts["files"] = files.digests if files else {}
    facts["versions"] = {"longspec": __version__} | {name: version(name) for name in LIBRARIES}
    return facts


def _read_facts(file: Path) -> dict[Any, Any]:
    try:
        return read_yaml(file)
    except UserError as error:
        raise UserError(f"{error}; restore this file, or remove {file.parent} to start again") from error


def _compare(file: Path, written: dict[str, Any], facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        if name != "versions" and written.get(name) != value:
            raise UserError(
                f"{file.parent}: has shards with {name} {written.get(name)}, not {value}; "
                "give another output folder, or remove this one"
            )


def _keys(files: tuple[str, ...]) -> set[bytes]:
    keys = set()
    for path in data_files(files) if files else ():
        for number, raw in enumerate(Path(path).read_bytes().splitlines(), 1):
            record = parse_record(path, number, raw)
            if "messages" not in record and "prefix" not in record:
                raise UserError(f"{path}, line {number}: exclude takes files that this command wrote")
            keys.add(prompt_key(record))
    return keys


@contextmanager
def _bar(settings: Settings, total: int, rank: int) -> Iterator[tuple[Progress, Callable[[int], None]]]:
    """A progress bar over prompts with new tokens per second; what counts tokens and answers, and what ends a shard."""
    started, tokens, counted, ended = time.perf_counter(), 0, 0, 0
    with tqdm(total=total, desc=f"{settings.split}, rank {rank}", unit="prompt", disable=rank > 0) as bar:

        def progress(new_tokens: int, answers: int) -> None:
            nonlocal tokens, counted
            tokens, counted = tokens + new_tokens, counted + answers
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):,.0f} tokens/s", refresh=False)
            bar.update(answers)

        def finish(prompts: int) -> None:
            nonlocal counted, ended
            ended += prompts
            bar.update(ended - counted)  # prompts that were dropped
            counted = ended

        yield progress, finish


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all. Raises UserError on a full disk."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(text.encode())
        os.replace(unfinished, file)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror}); the same command continues once this is fixed"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
