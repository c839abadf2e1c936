"""The functions of `decoding.c` on torch tensors: float32, on a CPU, contiguous unless said otherwise, for few tokens.

A token's results do not depend on the other tokens of a call. `runs_native` says whether they run here.
"""

import ctypes

import torch
from torch import Tensor

from longspec.kernels.native.library import native_library
from longspec.kernels.shared.residual import HeadNorms, TokenSlots

MOST_TOKENS = 32
"""Largest number of tokens for which products are faster than torch's. Those of more are bound by arithmetic."""
MOST_QUERIES = 16
"""Largest number of tokens for which attention is about as fast as torch's, or faster."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x [..., size], times weight [size]."""
    y = torch.empty_like(x)
    size = x.shape[-1]
    _library().rms_norm(_pointer(x), _pointer(weight), _pointer(y), x.numel() // size, size, eps)
    return y


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, x [B, N, in], weight [out, in]: [B, N, out]."""
    y = x.new_empty(*x.shape[:2], len(weight))
    _library().product(_pointer(x), _pointer(weight), _pointer(bias), _pointer(y), None, *_sizes(x, len(weight)))
    return y


def add_product(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """total += x @ weight.T, total [B, N, out], x [B, N, in], weight [out, in]."""
    added = torch.empty_like(total)
    _library().product(
        *(_pointer(x), _pointer(weight), None, _pointer(total), _pointer(added)), *_sizes(x, len(weight))
    )


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """silu(x @ gate.T) · (x @ up.T), x [B, N, in], weight [2 · out, in], gates first: [B, N, out]."""
    out = len(weight) // 2
    y = x.new_empty(*x.shape[:2], out)
    scratch = x.new_empty(2 * y.numel())
    _library().gated_product(_pointer(x), _pointer(weight), _pointer(y), _pointer(scratch), *_sizes(x, out))
    return y


def rotate_and_store(
    qkv: Tensor, positions: Tensor, slots: TokenSlots, places: Tensor | None = None, norms: HeadNorms | None = None
) -> Tensor:
    """The rotated queries [B, H, N, D] of qkv [B, N, (H + 2K) · D]; its keys, rotated, and its values are stored.

    positions: LongTensor [B, N]. slots: the rotary table and the cache, whose keys and values have the same strides and
    contiguous last two dimensions. places: LongTensor [B, N], row · stride of a row + slot · D, negative for a token
    that is not stored; None if qkv holds queries only. norms: RMSNorms of the heads before the rotation, which change
    qkv.
    """
    (sequences, nodes, width), (_, kv_heads, _, head_dim) = qkv.shape, slots.keys.shape
    assert slots.keys.dtype == slots.values.dtype == torch.float32 and slots.keys.stride() == slots.values.stride()
    kv_heads = 0 if places is None else kv_heads
    heads = width // head_dim - 2 * kv_heads
    q = qkv.new_empty(sequences, heads, nodes, head_dim)
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    _library().rotate_and_store(
        *(_pointer(qkv), _pointer(q), slots.keys.data_ptr(), slots.values.data_ptr(), *map(_pointer, slots.rope)),
        *(_pointer(positions, torch.long), _pointer(places, torch.long), _pointer(q_norm), _pointer(k_norm), eps),
        *(sequences * nodes, nodes, heads, kv_heads, head_dim, slots.keys.stride(1)),
    )
    return q


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, mask: Tensor | None, scale: float, window: int = 0, level: int = 0
) -> Tensor:
    """Attention of q [B, H, N, D] to keys and values of a cache as in `rotate_and_store`: [B, H, N, D].

    Each query sees slots 0 … lengths[b] - 1, lengths int32 [B], and of the M slots after them those where mask, bool
    [B, N, M], is True. With a window, it sees instead what `DecodingAttention.window` says of a ring buffer of W, and
    the M slots are those after the ring buffer. A query that sees no slot gets 0.
    """
    sequences, heads, nodes, size = q.shape
    assert k.dtype == v.dtype == torch.float32 and k.stride() == v.stride() and k.stride()[2:] == (size, 1)
    kv_heads, others = k.shape[1], 0 if mask is None else mask.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    threads = torch.get_num_threads()
    # The queries of a KV head are split until all threads have as many parts.
    queries, splits = heads // kv_heads * nodes, 1
    while sequences * kv_heads * splits % threads and splits < queries:
        splits += 1
    slots = (window or max(lengths.tolist())) + others
    scratch_size = -(-queries // splits) * (slots + -slots % 16)
    scratch = q.new_empty(threads * scratch_size)
    _library().attention(
        *(_pointer(q), k.data_ptr(), v.data_ptr(), _pointer(out), _pointer(scratch)),
        *(_pointer(lengths, torch.int32), _pointer(mask, torch.bool)),
        *(sequences, heads, kv_heads, nodes, size, k.stride(0), k.stride(1), others, window, level),
        *(splits, scratch_size, scale, threads),
    )
    return out


def _sizes(x: Tensor, out: int) -> tuple[int, int, int, int]:
    """Tokens, in, out, and the number of threads."""
    return x.shape[0] * x.shape[1], x.shape[2], out, torch.get_num_threads()


def _pointer(x: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    if x is None:
        return None
    assert x.dtype == dtype and x.is_contiguous()
    return x.data_ptr()


def _library() -> ctypes.CDLL:
    library = native_library()
    assert library is not None
    return library
