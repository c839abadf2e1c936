"""Compaction of the KV cache: the entries of the accepted nodes move to the end of the prefix, in all layers."""

import triton
import triton.language as tl
from torch import Tensor


# cache[..., length + j] = cache[..., length + path[j]] for j < count. One program takes one layer, sequence and KV
# head.
@triton.jit
def _compact_kernel(
    keys_ptr,
    values_ptr,
    lengths_ptr,
    path_ptr,
    counts_ptr,
    heads,
    batch_size,
    capacity,
    path_length,
    HEAD_DIM: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # All three leading dimensions [L, B, K] in one number.
    store = tl.program_id(0).to(tl.int64)
    batch = (store // heads) % batch_size
    step = tl.arange(0, BLOCK_J)
    dim = tl.arange(0, BLOCK_D)
    length = tl.load(lengths_ptr + batch).to(tl.int64)
    # Steps from count on stay where they are; their slots are free after the new length.
    moved = step < tl.minimum(tl.load(counts_ptr + batch), path_length)
    source = tl.load(path_ptr + batch * path_length + step, mask=moved, other=0).to(tl.int64)

    inside = moved[:, None] & (dim < HEAD_DIM)[None, :]
    base = (store * capacity + length) * HEAD_DIM
    source_offsets = base + source[:, None] * HEAD_DIM + dim[None, :]
    destination_offsets = base + step[:, None] * HEAD_DIM + dim[None, :]
    key = tl.load(keys_ptr + source_offsets, mask=inside, other=0.0)
    value = tl.load(values_ptr + source_offsets, mask=inside, other=0.0)
    # The destination of one step may be the source of another: all loads must be done before the first store.
    tl.debug_barrier()
    tl.store(keys_ptr + destination_offsets, key, mask=inside)
    tl.store(values_ptr + destination_offsets, value, mask=inside)


def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """See `Backend.compact`."""
    layers, batch, heads, capacity, head_dim = keys.shape
    _compact_kernel[(layers * batch * heads,)](
        *(keys, values, lengths, path.contiguous(), counts),
        *(heads, batch, capacity, path.shape[1]),
        HEAD_DIM=head_dim,
        BLOCK_J=triton.next_power_of_2(path.shape[1]),
        BLOCK_D=triton.next_power_of_2(head_dim),
    )
