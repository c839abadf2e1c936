"""Random rows for `benchmarks.training`, in the format of tokenized training data."""

from typing import Any

import numpy as np
from datasets import Dataset
from datasets.table import InMemoryTable

from longspec.data.collators import Collator
from longspec.data.dataset import RowDataset
from longspec.data.packing import Rows
from longspec.data.tokenization import TOKEN_FEATURES
from longspec.models.target_files import position_limit
from longspec.train.inputs import Inputs


def synthetic_inputs(config: Any, tokens: int, rows: int, packed: bool) -> Inputs:
    """`rows` full rows of `tokens` tokens each, with one segment per row or, if `packed`, one to three."""
    random = np.random.default_rng(0)
    lengths: list[int] = []
    starts = [0]
    for _ in range(rows):
        cuts = random.choice(np.arange(1, tokens), random.integers(3) if packed else 0, replace=False)
        lengths += np.diff([0, *sorted(cuts), tokens]).tolist()
        starts.append(len(lengths))
    ids = [random.integers(0, config.vocab_size, length).tolist() for length in lengths]
    columns = {
        "id": [str(number) for number in range(len(ids))],
        "input_ids": ids,
        "prompt_length": [0] * len(ids),
        "length": lengths,
    }
    # A fixed fingerprint, because Dataset.from_dict hashes the pickled table and some versions of pyarrow cannot.
    table = InMemoryTable.from_pydict(columns, schema=TOKEN_FEATURES.arrow_schema)
    samples = Dataset(table, fingerprint="synthetic")
    dataset = RowDataset(samples, Rows(np.arange(len(ids)), np.array(starts)))
    return Inputs(dataset, None, Collator(0, pad_to=tokens), None, None, position_limit(config))
