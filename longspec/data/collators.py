"""Rows of segments to a micro-batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

IGNORED = -100  # labels with this value are not in the loss


class Segment(TypedDict):
    """One sample of a row: its token ids [T], and how many of the first ones are prompt."""

    input_ids: Any
    prompt_length: int


@dataclass(frozen=True)
class Collator:
    """Makes a micro-batch of rows, each a list of segments that must not see one another.

    Stage 1 and long context (`nomask`) have every real token in the loss, long CoT (`answer_only`) the answers alone.
    Rows are padded on the right to `pad_to` tokens, or to the longest row of the batch.

    Returns `input_ids` and `labels`, Long [B, T], and `cu_seqlens`, int32 [S + 1], over the flattened B * T tokens.
    Labels are not shifted; the first token of each segment and all padding are -100. What is padding goes by length,
    not by id, so an EOS that is also the pad token is learnt. A row's padding is a segment of its own.
    """

    pad_token_id: int
    answer_only: bool = False
    pad_to: int | None = None

    def __call__(self, rows: Sequence[Sequence[Segment]]) -> dict[str, torch.Tensor]:
        length = self._padded_length(rows)
        input_ids = torch.full((len(rows), length), self.pad_token_id, dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)
        bounds = [0]
        for number, row in enumerate(rows):
            start = 0
            for segment in row:
                ids = torch.tensor(np.asarray(segment["input_ids"]), dtype=torch.long)
                end = start + len(ids)
                learnt_from = max(1, int(segment["prompt_length"]) if self.answer_only else 1)
                input_ids[number, start:end] = ids
                labels[number, start + learnt_from : end] = ids[learnt_from:]
                bounds.append(number * length + end)
                start = end
            if start < length:
                bounds.append((number + 1) * length)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "cu_seqlens": torch.tensor(bounds, dtype=torch.int32),
        }

    def _padded_length(self, rows: Sequence[Sequence[Segment]]) -> int:
        longest = max(sum(len(segment["input_ids"]) for segment in row) for row in rows)
        if self.pad_to is not None and longest > self.pad_to:
            raise ValueError(f"a row has {longest} tokens, more than pad_to = {self.pad_to}")
        return self.pad_to or longest
