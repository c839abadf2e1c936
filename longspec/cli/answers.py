"""Answers to many prompts, some of them at a time. Neither interruptions nor ranks change the answers."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from longspec.cli.output import StdoutLines
from longspec.cli.pair import LoadedPair, SamplingOptions
from longspec.cli.prompts import Prompt
from longspec.data.templates import check_embedded, encode_texts
from longspec.errors import UserError
from longspec.inference.answering import Listener
from longspec.inference.device import device_name
from longspec.inference.engine.requests import Tokens
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.request import row_seed
from longspec.inference.stats import GenerationStats, pool
from longspec.jobs.job import Count, ResumableJob, open_results
from longspec.jobs.results import Line, Results
from longspec.models.content import state_digest, target_digest
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals

SORTED_BATCHES = 16
"""Prompts, as a multiple of those that are answered at a time, of which the longest starts first. Hardly more answers
wait to be printed."""


@dataclass
class PromptRun:
    """Prompts to answer with a pair."""

    pair: LoadedPair
    prompts: Sequence[Prompt]
    sampling: SamplingOptions
    batch_size: int
    seed: int
    chat: bool
    """Whether a prompt of plain text is a user turn in the chat format."""
    skips: bool = False
    """Whether prompts that the target cannot take are left out."""
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
                if not self.skips:
                    advice = "; --skip_invalid leaves such prompts out" if len(self.prompts) > 1 else ""
                    raise UserError(f"{error}{advice}") from error
                self.problems.append(str(error))
        if not self.token_ids:
            raise UserError(f"{self.note}; no prompt is left")

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            text = self.pair.text(prompt.as_turn() if self.chat else prompt.content)
        except UserError as error:  # the chat template fails
            raise UserError(f"{prompt.location}: {error}") from error
        (ids,) = encode_texts([text], self.pair.tokenizer)
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
        # Greedy answers do not depend on the seed.
        is_greedy = self.sampling.temperature == 0
        # Method "auto" does without an untrained draft.
        drafts = pair.method in GLIDE_METHODS or (pair.method == AUTO and pair.model.draft_is_trained)
        return {
            "target": target_digest(str(pair.model.config.name_or_path), pair.model.config),
            "draft": state_digest(pair.model.draft_model.state_dict()) if drafts else None,
            "method": pair.method,
            "dtype": str(pair.model.dtype),
            "chat_format": pair.chat_format,
            "chat": self.chat,
            "sampling": vars(self.sampling),
            "drawn": None if is_greedy else self.seed,
            **pair.drafting,
            # Absent by default, so that files of earlier runs go on.
            **({"deterministic": True} if pair.deterministic else {}),
        }

    def head(self, number: int) -> Line:
        """The entries of a line that come before its answer."""
        return {"index": number, **self.prompts[number].record}

    @cached_property
    def digest(self) -> str:
        """A digest of the identity, which is in each line."""
        return hashlib.blake2b(json.dumps(self.identity, sort_keys=True).encode(), digest_size=8).hexdigest()

    def line(self, number: int, tokens: list[int]) -> Line:
        """The line of an answer."""
        finished = tokens[-1] in self.pair.stop_ids
        # Without clean-up, because that of some tokenizers removes spaces that the target wrote.
        text = self.pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        answer = {"text": text, "new_tokens": len(tokens), "finish_reason": "stop" if finished else "length"}
        return self.head(number) | answer | {"run": self.digest}

    def read_line(self, raw: bytes) -> Line:
        """Check a line of an earlier run, and return its index. Raises ValueError for a line of another run."""
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not {"index", "text", "run"} <= line.keys():
            raise ValueError("not a line that this command writes")
        index = line["index"]
        is_known = isinstance(index, int) and index in self.token_ids
        if not is_known or any(line.get(name) != value for name, value in self.head(index).items()):
            raise ValueError("belongs to another prompt")
        if line["run"] != self.digest:
            raise ValueError("was written by another pair or with other options")
        return {"index": index}


def answer_prompts(
    run: PromptRun,
    output: Path | None,
    overwrite: bool,
    stop: StopSignals,
    replicas: Replicas,
    report: Callable[[dict[str, Any]], object],
) -> None:
    """Answer this rank's share of the prompts without a line, and leave all lines in the output.

    Each prompt has a seed of its own, and no answer depends on others, so the answers are those of an uninterrupted
    single process. output: None is stdout, for a single process. report: called with the summary on
    rank 0. Raises UserError, and SystemExit after a stop signal or the end of another rank.
    """
    job = ResumableJob(
        len(run.token_ids), "prompt", output, stop, replicas, is_hidden=not sys.stderr.isatty(), overwrites=overwrite
    )
    results: Results | StdoutLines = StdoutLines(list(run.token_ids))
    if output is not None:
        path = output.absolute()  # a relative path has no folder of its own
        first = partial(Results, path, run.read_line, overwrite)
        results = open_results(first, run.identity, path, run.read_line, replicas)
        replicas.rank_zero_first(results.start)
    stop.at_once = False
    answered = replicas.gather(_answer_missing(run, results, job))
    if replicas.rank == 0:
        results.put_in_order()
        stats, new_tokens = zip(*answered, strict=True)
        report(summarize(run, len(results.done), sum(new_tokens), stats))
    job.end(len(results.done))


def _answer_missing(run: PromptRun, results: Results | StdoutLines, job: ResumableJob) -> tuple[GenerationStats, int]:
    """Answer this rank's share of the prompts without a line. Returns the statistics and the number of new tokens."""
    stats, new_tokens = GenerationStats(), 0

    def work(units: Iterator[int], count: Count) -> None:
        nonlocal stats
        own = list(units)
        answers: list[list[int]] = [[] for _ in own]

        def take(row: int, event: Tokens) -> None:
            answers[row] += event.ids

        def finish(row: int, own_stats: GenerationStats) -> None:
            nonlocal new_tokens
            results.add(run.line(own[row], answers[row]))
            new_tokens += len(answers[row])
            count(1)

        prompts, seeds = [run.token_ids[number] for number in own], [row_seed(run.seed, number) for number in own]
        listener = Listener(take, finish, job.is_stopped, in_blocks=True)
        window = SORTED_BATCHES * run.batch_size
        stats = run.pair.answer_all(prompts, run.sampling, seeds, run.batch_size, listener, window)

    missing = [number for number in run.token_ids if number not in results.done]
    job.run(missing, lambda number: len(run.token_ids[number]) + run.sampling.max_new_tokens, work, len(results.done))
    return stats, new_tokens


def summarize(run: PromptRun, answered: int, new_tokens: int, stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """The summary of a launch.

    answered: number of prompts with a line; new_tokens: number of tokens in the lines of the launch; stats: those of
    all ranks.
    """
    pair = run.pair
    pooled = pool(list(stats))
    return {
        "model": pair.name,
        "method": pair.method,
        "device": device_name(pair.model.device),
        "prompts": len(run.prompts),
        "answered": answered,
        "left_out": len(run.problems),
        "processes": len(stats),
        "new_tokens": new_tokens,
        "rounds": pooled.rounds,
        "mean_acceptance_length": pooled.mean_acceptance_length if pooled.rounds else None,
        "tokens_per_second": pooled.tokens_per_second if pooled.decode_s else None,
        **pooled.setup,
        "rounds_by_plan": pooled.rounds_by_plan,
        "ttft_s": pooled.ttft_s,
        "decode_s": pooled.decode_s,
    }
