"""Collation of rows into a micro-batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch

IGNORED = -100
"""Label of tokens that are not in the loss."""


class Segment(TypedDict):
    """One sample of a row, or a piece of one."""

    input_ids: Any
    """Token ids, integers [T]."""
    prompt_length: int
    """Number of leading tokens that belong to the prompt."""


@dataclass(frozen=True)
class Collator:
    """A function from rows to a micro-batch. A row is a list of segments that do not attend to each other.

    It returns `input_ids` and `labels`, LongTensor [B, T], and `cu_seqlens`, int32 [M + 1], over the flattened B·T
    tokens. Labels are not shifted. The first token of each segment and all padding have the label -100. Padding is
    recognized by position and not by id, so that an EOS with the id of the pad token is learned. The padding of a row
    is a segment of its own.
    """

    pad_token_id: int
    answer_only: bool = False
    """Whether only answers are in the loss (long CoT), or every real token."""
    pad_to: int | None = None
    """Length of padded rows in tokens; None for the longest row of the batch."""

    def __call__(self, rows: Sequence[Sequence[Segment]]) -> dict[str, torch.Tensor]:
        # A fixed length gives every micro-batch the same shape, which CUDA graphs need.
        length = self.pad_to or max(sum(len(segment["input_ids"]) for segment in row) for row in rows)
        input_ids = torch.full((len(rows), length), self.pad_token_id, dtype=torch.long)
        labels = torch.full_like(input_ids, IGNORED)

        borders = [0]
        for row_number, row in enumerate(rows):
            start = 0
            for segment in row:
                ids = torch.tensor(np.asarray(segment["input_ids"]), dtype=torch.long)
                end = start + len(ids)
                # Nothing in the segment predicts its first token.
                first_label = max(1, int(segment["prompt_length"]) if self.answer_only else 1)
                input_ids[row_number, start:end] = ids
                # In Hugging Face form: `labels` equals `input_ids`, and the loss shifts them.
                labels[row_number, start + first_label : end] = ids[first_label:]
                borders.append(row_number * length + end)
                start = end
            if start < length:
                borders.append((row_number + 1) * length)

        return {"input_ids": input_ids, "labels": labels, "cu_seqlens": torch.tensor(borders, dtype=torch.int32)}
