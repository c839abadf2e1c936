"""Acceptance that does not hang on what a small target says: on real text, and as its probabilities have it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.pipeline.forced import ForcedAcceptance, teacher_forced_acceptance
from scripts.reproduce.pair import LoadedPair, Prompt
from scripts.reproduce.tokens import read_rows


def held_out_rows(ids: Path, length: int, count: int) -> Tensor:
    """LongTensor [count or fewer, length]: rows spread over the token ids in a file of the step `tokens`."""
    rows = read_rows(ids, length)
    return torch.from_numpy(rows[:: max(1, len(rows) // count)][:count].astype(np.int64))


def on_held_out_text(
    pair: LoadedPair, ids: Path, context: int, rows: int, tokens: int, shape: tuple[int, ...]
) -> dict[str, Any] | None:
    """The tree on the last `tokens` tokens of rows of `context` tokens, on half of them at most; None if the text does
    not fill a row."""
    found = held_out_rows(ids, context, rows).to(pair.model.device)
    if not len(found):
        return None
    prompts, ends = ([length] * len(found) for length in (context - min(tokens, context // 2), context))
    return described(teacher_forced_acceptance(pair.model, found, prompts, ends, shape))


def on_samples(
    pair: LoadedPair, lines: list[dict[str, Any]], prompts: list[Prompt], shape: tuple[int, ...]
) -> dict[str, Any] | None:
    """The tree on what the target itself emitted in these cells, beside the target's probabilities at temperature 1.

    Rounds begin where the draft's tree and the emitted text say, as in decoding with the rule `descend`: the expected
    acceptance length is what that rule's must agree with.
    """
    by_place = {(prompt.task, prompt.context, prompt.id): prompt.token_ids[0] for prompt in prompts}
    read, rows = [], []
    for line in lines:
        for sample in line["samples"]:
            prompt = by_place[line["task"], line["context"], sample["id"]]
            emitted = torch.tensor(sample["token_ids"], device=prompt.device)
            read.append(len(prompt))
            rows.append(torch.cat([prompt, emitted]))
    if not rows:
        return None
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return described(teacher_forced_acceptance(pair.model, padded, read, [len(row) for row in rows], shape))


def described(found: ForcedAcceptance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return asdict(found) | {"acceptance_length": found.acceptance_length, "expected_length": found.expected_length}
