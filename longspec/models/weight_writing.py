"""Writes a target's weights as safetensors without holding them in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from tqdm import tqdm
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

MAX_SHARD = "4GB"
NAMES_OF_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    blocks: Callable[[str], Iterable[Tensor]],
    label: str,
) -> None:
    """Write weights in the files that transformers would write, a block at a time, with a progress bar.

    shapes: the shape of each weight. blocks: function from a weight's name to its rows in order, in contiguous parts of
    `dtype`.
    label: text of the progress bar, which appears after a second.
    """
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    pattern = "model{suffix}.safetensors"
    plan = split_torch_state_dict_into_shards(weights, filename_pattern=pattern, max_shard_size=MAX_SHARD)
    size = sum(weight.nbytes for weight in weights.values())
    with tqdm(total=size, desc=label, unit="B", unit_scale=True, delay=1) as bar:
        for file, names in plan.filename_to_tensors.items():
            with (folder / file).open("wb") as handle:
                # Readers expect the weights without gaps; safetensors itself sorts them by name.
                handle.write(_header({name: weights[name] for name in sorted(names)}))
                for name in sorted(names):
                    for block in blocks(name):
                        bar.update(handle.write(block.view(torch.uint8).numpy().data))
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))


def _header(weights: Mapping[str, Tensor]) -> bytes:
    """A safetensors header: its length as 8 bytes, then JSON with the place of each weight, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, weight in weights.items():
        end = start + weight.nbytes
        dtype = NAMES_OF_DTYPES[weight.dtype]
        entries[name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
