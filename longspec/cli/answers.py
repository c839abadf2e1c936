"""Answers to many prompts, some of them at a time. Neither interruptions nor ranks change the answers."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from longspec.cli.output import StdoutLines, write_summary
from longspec.cli.pair import LoadedPair, SamplingOptions
from longspec.cli.prompts import Prompt
from longspec.data.aligners import as_turns
from longspec.data.templates import check_embedded
from longspec.errors import UserError
from longspec.inference.answering import answer_all, whole_answers
from longspec.inference.device import device_name
from longspec.inference.request import row_seed
from longspec.inference.stats import GenerationStats, pool
from longspec.jobs.job import Count, Identity, ResumableJob, differences, open_results
from longspec.jobs.results import Line, Results, json_bytes
from longspec.models.content import state_digest, target_digest
from longspec.ranks.replicas import Replicas
from longspec.replacing import write_atomically
from longspec.signals import StopSignals
from longspec.untrusted import read_json

SORTED_BATCHES = 16
"""Prompts, as a multiple of those that are answered at a time, of which the longest starts first."""


@dataclass
class PromptRun:
    """Prompts to answer with a pair."""

    pair: LoadedPair
    prompts: Sequence[Prompt]
    sampling: SamplingOptions
    batch_size: int
    seed: int
    chat: bool = True
    """Whether a prompt of plain text is a user turn in the chat format."""
    skips: bool | None = None
    """Whether prompts that the target cannot take are left out; None for a command without this option."""
    token_ids: dict[int, list[int]] = field(init=False, default_factory=dict)
    """The prompts as the target reads them, by number."""
    problems: list[str] = field(init=False, default_factory=list)
    """The reason for each prompt that is left out."""

    def __post_init__(self) -> None:
        """Raises UserError, with its location, for a prompt that the target cannot take, and if none is left."""
        for number, prompt in enumerate(self.prompts):
            try:
                self.token_ids[number] = self._encode(prompt)
            except UserError as error:
                self.problems.append(str(error))
        if self.problems and not self.skips:
            advice = "" if self.skips is None else "; --skip_invalid leaves such prompts out"
            raise UserError(f"{self.problems[0]}{advice}")
        if not self.token_ids:
            raise UserError(f"{self.note}; no prompt is left")

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            (ids,) = self.pair.encode([as_turns(prompt.content) if self.chat else prompt.content])
        except UserError as error:  # the chat template fails
            raise UserError(f"{prompt.location}: {error}") from error
        check_embedded(ids, self.pair.model.config.vocab_size, self.pair.tokenizer, prompt.location)
        if not ids or len(ids) + self.sampling.max_new_tokens > self.pair.positions:
            raise UserError(
                f"{prompt.location}: {len(ids)} tokens + --max_new_tokens {self.sampling.max_new_tokens}; "
                f"the target has {self.pair.positions} positions"
            )
        return ids

    @property
    def note(self) -> str:
        """A line on the prompts that are left out, if there are any."""
        return f"{len(self.problems)} of {len(self.prompts)} prompts left out; the first one: {self.problems[0]}"

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the answers, apart from the prompts."""
        pair = self.pair
        draft = state_digest(pair.model.draft_model.state_dict()) if pair.model.draft_is_trained else None
        return {
            "target": target_digest(str(pair.model.config.name_or_path), pair.model.config),
            "draft": draft,
            "method": pair.method,
            "dtype": str(pair.model.dtype),
            "chat_format": pair.chat_format,
            "chat": self.chat,
            "sampling": vars(self.sampling),
            "seed": self.seed if self.sampling.temperature else None,
            "deterministic": pair.deterministic,
            **pair.drafting,
        }

    def head(self, number: int) -> Line:
        """The entries of a line that come before its answer."""
        return {"index": number, **self.prompts[number].record}

    @cached_property
    def digest(self) -> str:
        """A digest of the identity, which is in each line. The file OUTPUT.run names its entries."""
        return hashlib.blake2b(json.dumps(self.identity, sort_keys=True).encode(), digest_size=8).hexdigest()

    def line(self, number: int, tokens: list[int]) -> Line:
        finished = tokens[-1] in self.pair.stop_ids
        # Without clean-up, because that of some tokenizers removes spaces that the target wrote.
        text = self.pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answer = {"text": text, "new_tokens": len(tokens), "finish_reason": "stop" if finished else "length"}
        return self.head(number) | answer | {"run": self.digest}

    def read_line(self, stored: Identity, raw: bytes) -> Line:
        """Check a line of an earlier run, and return its index. Raises ValueError for a line of another run.

        stored: the earlier run's identity, if it is known.
        """
        try:
            line = json.loads(raw)
            number = line["index"]
            is_own = number in self.token_ids and line.items() >= (self.head(number) | {"run": self.digest}).items()
        except (ValueError, TypeError, LookupError):
            is_own = False
        if not is_own:
            # The sampling options count by name.
            runs = [{**run, **run.get("sampling", {}), "sampling": None} for run in (stored, self.identity)]
            differing = differences(*runs) if stored else ""
            run = f"another run ({differing})" if differing else "another pair, of other prompts or of other options"
            raise ValueError(f"a line of {run}")
        return {"index": number}


def run_record(output: Path) -> Path:
    """The file next to an output that names what determines its answers."""
    return output.with_name(f"{output.name}.run")


def answer_prompts(
    run: PromptRun, output: Path | None, overwrite: bool, summary: Path | None, stop: StopSignals, replicas: Replicas
) -> None:
    """Answer this rank's share of the prompts without a line, and leave all lines in the output.

    Each prompt has a seed of its own, and no answer depends on others, so the answers are those of an uninterrupted
    single process. output: None is stdout, for a single process. summary: as for `write_summary`. Raises UserError, and
    SystemExit after a stop signal or the end of another rank.
    """
    job = ResumableJob(
        len(run.token_ids), "prompt", output, stop, replicas, is_hidden=not sys.stderr.isatty(), overwrites=overwrite
    )
    results: Results | StdoutLines = StdoutLines(list(run.token_ids))
    if output is not None:
        path = output.absolute()  # a relative path has no folder of its own
        record = run_record(path)
        stored: Identity = {}
        with suppress(UserError):  # each line has the digest; the record only says what differs
            stored = read_json(record)
        read_line = partial(run.read_line, stored)
        results = open_results(partial(Results, path, read_line, overwrite), run.identity, path, read_line, replicas)
        replicas.rank_zero_first(results.start)
        if replicas.rank == 0:
            write_atomically(record, json_bytes(run.identity, indent=1) + b"\n")
    stop.at_once = False
    answered = replicas.gather(_answer_missing(run, results, job))
    if replicas.rank == 0:
        results.put_in_order()
        stats, new_tokens = zip(*answered, strict=True)
        counts = {"answered": len(results.done), "processes": len(stats), "new_tokens": sum(new_tokens)}
        write_summary(summarize(run, pool(stats)) | counts, summary)
    job.end(len(results.done))
    if output is not None and replicas.rank == 0:
        print(f"written to {output}: {len(results.done)} of {len(run.token_ids)} prompts answered")


def _answer_missing(run: PromptRun, results: Results | StdoutLines, job: ResumableJob) -> tuple[GenerationStats, int]:
    """Answer this rank's share of the prompts without a line. Returns the statistics and the number of new tokens."""
    stats, new_tokens = GenerationStats(), 0

    def work(units: Iterator[int], count: Count) -> None:
        nonlocal stats
        own = list(units)

        def finish(row: int, tokens: list[int], own_stats: GenerationStats) -> None:
            nonlocal new_tokens
            results.add(run.line(own[row], tokens))
            new_tokens += len(tokens)
            count(1)

        prompts, seeds = [run.token_ids[number] for number in own], [row_seed(run.seed, number) for number in own]
        listener = whole_answers(finish, job.is_stopped)
        stats = answer_all(
            **run.pair.decoding(),
            requests=run.pair.requests(prompts, run.sampling, seeds),
            max_rows=run.batch_size,
            listener=listener,
            window=SORTED_BATCHES * run.batch_size,
        )

    missing = [number for number in run.token_ids if number not in results.done]
    job.run(missing, lambda number: len(run.token_ids[number]) + run.sampling.max_new_tokens, work, len(results.done))
    return stats, new_tokens


def summarize(run: PromptRun, stats: GenerationStats) -> dict[str, Any]:
    """What the summary of a launch says about its answers. stats: those of all ranks."""
    return {
        "model": run.pair.name,
        "method": run.pair.method,
        "device": device_name(run.pair.model.device),
        "prompts": len(run.prompts),
        "left_out": len(run.problems),
        "rounds": stats.rounds,
        "mean_acceptance_length": stats.mean_acceptance_length if stats.rounds else None,
        "tokens_per_second": stats.tokens_per_second if stats.decode_s else None,
        **stats.setup,
        "rounds_by_plan": stats.rounds_by_plan,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
    }
