"""Answering many prompts: batches of similar length, with answers that do not depend on interruptions."""

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
from longspec.inference.decoder import GenerationStats
from longspec.inference.methods import GLIDE_METHODS
from longspec.inference.report import device_name, pool
from longspec.inference.tree_shapes import draft_fingerprint
from longspec.models.content import target_digest
from longspec.signals import StopSignals

WINDOW = 16
"""Number of batches whose prompts are sorted by length together, and whose lines may wait for an earlier one."""


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
        contents = [prompt.content for prompt in self.prompts]
        self.token_ids = self.pair.encode(
            [[{"role": "user", "content": one}] if self.chat and isinstance(one, str) else one for one in contents]
        )
        for prompt, ids in zip(self.prompts, self.token_ids, strict=True):
            if not ids or len(ids) + self.sampling.max_new_tokens > self.pair.positions:
                raise UserError(
                    f"{prompt.where}: {len(ids)} tokens + --max_new_tokens {self.sampling.max_new_tokens}; "
                    f"the target has {self.pair.positions} positions"
                )

    @property
    def run(self) -> str:
        """A digest of what decides about the answers, apart from the prompts."""
        pair, greedy = self.pair, self.sampling.temperature == 0
        facts = {
            "target": target_digest(str(pair.model.config.name_or_path), pair.model.config),
            "draft": draft_fingerprint(pair.model) if pair.method in GLIDE_METHODS else None,
            "method": pair.method,
            "dtype": str(pair.model.dtype),
            "chat_format": pair.chat_format,
            "chat": self.chat,
            "sampling": vars(self.sampling),
            "drawn": None if greedy else (self.seed, self.batch_size),
        }
        return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()

    def batches(self) -> Iterator[list[int]]:
        """The numbers of the prompts of each batch, window by window, in each the longest prompts first."""
        for first in range(0, len(self.prompts), WINDOW * self.batch_size):
            rows = range(first, min(first + WINDOW * self.batch_size, len(self.prompts)))
            by_length = sorted(rows, key=lambda row: len(self.token_ids[row]), reverse=True)
            yield from (by_length[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size))


def answer_prompts(job: Job, results: Results, stop: StopSignals) -> dict[str, Any]:
    """Answer the prompts without a line, up to a stop signal; a summary.

    A batch's composition and seed do not depend on the batches before it, so a continued run draws what an
    uninterrupted one would have drawn.
    """
    pair, earlier, pooled, new_tokens = job.pair, results.done, GenerationStats(), 0
    with tqdm(total=len(job.prompts), initial=earlier, unit="prompt", disable=not sys.stderr.isatty()) as progress:
        for number, batch in enumerate(job.batches()):
            if stop.received is not None:
                break
            if max(batch) < earlier:
                continue
            output = pair.generate([job.token_ids[row] for row in batch], job.sampling, seed=job.seed + number)
            pooled = pool([pooled, output.stats])
            for row, tokens in zip(batch, (tokens.tolist() for tokens in output.new_tokens), strict=True):
                if row >= earlier:
                    new_tokens += len(tokens)
                    results.add(row, _answer(pair, tokens))
            progress.update(results.done - progress.n)
    return {
        "model": pair.name,
        "method": pair.method,
        "device": device_name(pair.model.device),
        "prompts": len(job.prompts),
        "answered": results.done,
        "new_tokens": new_tokens,
        "rounds": pooled.rounds,
        "mean_acceptance_length": pooled.mean_acceptance_length if pooled.rounds else None,
        "tokens_per_second": pooled.tokens_per_second if pooled.decode_s else None,
        "ttft_s": pooled.ttft_s,
        "decode_s": pooled.decode_s,
    }


def _answer(pair: LoadedPair, tokens: list[int]) -> dict[str, Any]:
    finished = tokens[-1] in pair.stop_ids
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"text": text, "new_tokens": len(tokens), "finish_reason": "stop" if finished else "length"}
