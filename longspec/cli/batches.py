"""Answers to many prompts, in batches of similar length. Neither interruptions nor ranks change the answers."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from longspec.cli.pair import LoadedPair, Sampling
from longspec.cli.prompts import Prompt
from longspec.cli.results import Results
from longspec.errors import UserError
from longspec.inference.device import device_name
from longspec.inference.methods import AUTO, GLIDE_METHODS
from longspec.inference.request import row_seed
from longspec.inference.stats import GenerationStats, pool
from longspec.models.content import state_digest, target_digest
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals

PROMPTS = "prompts"
"""Name of the shared counter of prompts that have a line."""
SORTED_BATCHES = 16
"""Number of batches whose prompts are sorted by length together. At most this many batches wait to be written."""


@dataclass
class Job:
    """Prompts to answer with a pair."""

    pair: LoadedPair
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int
    seed: int
    chat: bool
    """Whether a prompt of plain text is a user turn in the chat format."""
    token_ids: list[list[int]] = field(init=False)
    """The prompts as the target reads them."""

    def __post_init__(self) -> None:
        """Raises UserError for a prompt that leaves no room for its answer."""
        turns = [prompt.as_turn() if self.chat else prompt.content for prompt in self.prompts]
        self.token_ids = self.pair.encode(turns)
        for prompt, ids in zip(self.prompts, self.token_ids, strict=True):
            if not ids or len(ids) + self.sampling.max_new_tokens > self.pair.positions:
                raise UserError(
                    f"{prompt.location}: {len(ids)} tokens + --max_new_tokens {self.sampling.max_new_tokens}; "
                    f"the target has {self.pair.positions} positions"
                )

    @property
    def run(self) -> str:
        """A digest of everything that determines the answers, apart from the prompts."""
        pair = self.pair
        # Greedy answers do not depend on the seed.
        is_greedy = self.sampling.temperature == 0
        # Method "auto" does without an untrained draft.
        drafts = pair.method in GLIDE_METHODS or (pair.method == AUTO and pair.model.draft_is_trained)
        facts = {
            "target": target_digest(str(pair.model.config.name_or_path), pair.model.config),
            "draft": state_digest(pair.model.draft_model.state_dict()) if drafts else None,
            "method": pair.method,
            "dtype": str(pair.model.dtype),
            "chat_format": pair.chat_format,
            "chat": self.chat,
            "sampling": vars(self.sampling),
            "drawn": None if is_greedy else self.seed,
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()

    def batches(self) -> Iterator[list[int]]:
        """The numbers of each batch's prompts. Within SORTED_BATCHES batches the longest prompts come first."""
        sorted_prompts = SORTED_BATCHES * self.batch_size
        for first in range(0, len(self.prompts), sorted_prompts):
            rows = range(first, min(first + sorted_prompts, len(self.prompts)))
            # Longest first: a batch that does not fit into memory fails at the start and not after hours.
            by_length = sorted(rows, key=lambda row: len(self.token_ids[row]), reverse=True)
            for start in range(0, len(rows), self.batch_size):
                yield by_length[start : start + self.batch_size]


@dataclass
class Share:
    """The figures of the batches that a rank has decoded."""

    new_tokens: int = 0
    """Number of tokens in the answers that were written."""
    stats: GenerationStats = field(default_factory=GenerationStats)
    """Counts and times of all batches."""


def answer_prompts(job: Job, results: Results, stop: StopSignals, replicas: Replicas) -> Share | None:
    """Answer this rank's share of the prompts without a result line, until all have one or a stop signal arrives.

    The prompts of a batch and their seeds depend neither on earlier batches nor on the ranks, so the answers are those
    of an uninterrupted single process. Returns once all ranks have finished; None if one has ended before.
    """
    earlier = set(results.done)
    # Batches whose answers are all written are skipped; a partly written one is decoded again.
    batches = [batch for batch in job.batches() if not earlier.issuperset(batch)]
    loads = [max(len(job.token_ids[row]) for row in batch) + job.sampling.max_new_tokens for batch in batches]
    share = Share()
    replicas.count(PROMPTS, len(earlier) if replicas.rank == 0 else 0)
    is_hidden = replicas.rank > 0 or not sys.stderr.isatty()
    with tqdm(total=len(job.prompts), initial=len(earlier), unit="prompt", disable=is_hidden) as progress:

        def show(written: int = 0) -> None:
            progress.update(replicas.count(PROMPTS, written) - progress.n)

        for batch in (batches[index] for index in replicas.share(loads)):
            if replicas.stopped(stop):
                break
            before = len(results.done)
            prompts = [job.token_ids[row] for row in batch]
            output = job.pair.generate(prompts, job.sampling, seed=[row_seed(job.seed, row) for row in batch])
            share.stats = pool([share.stats, output.stats])
            for row, row_tokens in zip(batch, output.new_tokens, strict=True):
                if row not in earlier:
                    share.new_tokens += len(row_tokens)
                    results.add(row, _answer(job.pair, row_tokens.tolist()))
            show(len(results.done) - before)
        return share if replicas.meet(stop, show) else None


def summarize(job: Job, answered: int, shares: Sequence[Share]) -> dict[str, Any]:
    """The summary of a launch. answered: number of prompts with a line; shares: those of all ranks."""
    pair = job.pair
    pooled = pool([share.stats for share in shares])
    return {
        "model": pair.name,
        "method": pair.method,
        "device": device_name(pair.model.device),
        "prompts": len(job.prompts),
        "answered": answered,
        "processes": len(shares),
        "new_tokens": sum(share.new_tokens for share in shares),
        "rounds": pooled.rounds,
        "mean_acceptance_length": pooled.mean_acceptance_length if pooled.rounds else None,
        "tokens_per_second": pooled.tokens_per_second if pooled.decode_s else None,
        **pooled.setup,
        "rounds_by_plan": pooled.rounds_by_plan,
        "ttft_s": pooled.ttft_s,
        "decode_s": pooled.decode_s,
    }


def _answer(pair: LoadedPair, tokens: list[int]) -> dict[str, Any]:
    """The fields of an answer in a line of results."""
    finished = tokens[-1] in pair.stop_ids
    # Without clean-up, because that of some tokenizers removes spaces that the target wrote.
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"text": text, "new_tokens": len(tokens), "finish_reason": "stop" if finished else "length"}
