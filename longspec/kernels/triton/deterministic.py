"""The backend whose results for a token depend on the tokens before it alone, bit for bit.

Hence a tree's tokens, and the keys and values that it leaves in the cache, are those of decoding one token at a time,
in any batch. In products, a row's sums have one order for any number of rows. In attention, keys are read in blocks of
BLOCK_N at absolute positions, blocks form splits at absolute positions, and the states of the splits are merged in the
order of positions. A node of a tree finds its ancestors at the positions after the prefix, where they are once
accepted. The kernels are in `deterministic_blocks`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from longspec.kernels.shared.attention import Attend
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.attention_tiles import LOG2_E, check_layout, padded_dim
from longspec.kernels.triton.backend import TritonBackend
from longspec.kernels.triton.deterministic_blocks import (
    count_splits,
    last_blocks_kernel,
    paths_kernel,
    whole_blocks_kernel,
)
from longspec.kernels.triton.layers import TritonStream
from longspec.kernels.triton.overlap import overlap_options
from longspec.kernels.triton.skinny_product import skinny_product, split_product

BLOCK_N = 64
"""Keys per block."""
MANY_ROWS = 64
"""Query rows per program, of several nodes."""


class DeterministicAttention(TritonAttention):
    """Decoding attention and prefill that give a query the same result in every pass; the draft's is Triton's."""

    name = "deterministic"

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        paths = root_paths(tree_mask) if tree_mask.shape[2] > 1 else None

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return path_attention(q, k, v, lengths, paths, scale)

        return attend

    chunk = DecodingAttention.chunk  # none: Triton's sums in another order than `prefill`

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_attention(q, k, v, scale)


def root_paths(tree_mask: Tensor) -> Tensor:
    """The depth of each node, then the nodes on its path from the root: int32 [B, N, M + 1], undefined after the path.

    tree_mask: bool [B, N, M], True where node j is on the path to node i; a path's numbers increase.
    """
    batch, nodes, keys = tree_mask.shape
    paths = torch.empty(batch, nodes, keys + 1, dtype=torch.int32, device=tree_mask.device)
    # At least one node per thread.
    block = max(128, triton.next_power_of_2(keys))
    paths_kernel[(nodes, batch)](
        tree_mask.view(torch.uint8), paths, *tree_mask.stride(), NODES=keys, BLOCK=block, num_warps=4
    )
    return paths


def path_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, paths: Tensor | None, scale: float) -> Tensor:
    """Attention of each node to its prefix and to the nodes on its path, itself included, as if they were accepted.

    q [B, H, N, D]; k, v: the cache [B, K, S, D]; last dimensions contiguous; one dtype (fp32, fp16, bf16). lengths int
    [B]. Node j is in slot lengths[b] + j. paths: see `root_paths`; None for a single node. Returns [B, H, N, D] in q's
    dtype, a view of [B, N, H, D]. Raises ValueError for tensors of other layouts.
    """
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = heads // kv_heads * nodes
    states = count_splits(k.shape[2]), batch, kv_heads, rows
    outs = torch.empty(*states, head_dim, dtype=torch.float32, device=q.device)
    sums, maxima = torch.empty(2, *states, dtype=torch.float32, device=q.device)
    block_m = max(16, triton.next_power_of_2(rows)) if rows <= MANY_ROWS else MANY_ROWS
    whole_blocks_kernel[(triton.cdiv(rows, block_m), states[0], batch * kv_heads)](
        *(q, k, v, lengths, outs, sums, maxima),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(scale * LOG2_E, kv_heads, heads // kv_heads, rows),
        OVERLAP=describe_gpu(q.device).overlaps,
        **_launch_options(q, block_m, 4),
    )
    return _last_blocks(q, k, v, lengths, paths, (outs, sums, maxima), 0, scale)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of a chunk of the prompt: query i of N is at position S - N + i and sees the keys up to its own.

    q [B, H, N, D]; k, v [B, K, S, D]. Dtypes, layout, result and errors as in `path_attention`.
    """
    check_layout(q, k, v)
    return _last_blocks(q, k, v, None, None, None, k.shape[2] - q.shape[2], scale)


def _last_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    paths: Tensor | None,
    states: tuple[Tensor, Tensor, Tensor] | None,
    start: int,
    scale: float,
) -> Tensor:
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # [B, N, H, D] in memory, so that the output projection reads contiguous rows.
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    block_m = MANY_ROWS if states is None else max(16, triton.next_power_of_2(group))
    tiles = triton.cdiv(group * nodes, block_m) if states is None else nodes
    # A pointer argument that the kernel does not read is q.
    pointers = [q if x is None else x for x in (lengths, paths, *(states or (None,) * 3))]
    last_blocks_kernel[(tiles, batch * kv_heads)](
        *(q, k, v, *pointers, out),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(*out.stride()[:3], scale * LOG2_E, start, 0 if paths is None else paths.shape[2] - 1),
        *(kv_heads, group, group * nodes),
        CONTINUES=states is not None,
        HAS_PATHS=paths is not None,
        **_launch_options(q, block_m, 3 if states is None else 2),
        **overlap_options(states is not None and describe_gpu(q.device).overlaps),
    )
    return out


def _launch_options(q: Tensor, block_m: int, most_stages: int) -> dict[str, int | bool]:
    """Block sizes and options that both kernels share. Without fused multiplication and addition both round alike."""
    block_d = padded_dim(q.shape[3])
    # Queries and weights stay, and 4096 bytes are for Triton's reductions and changes of layout.
    room = describe_gpu(q.device).shared_memory - 4096 - block_m * (block_d + BLOCK_N) * q.element_size()
    stages = room // (2 * BLOCK_N * block_d * q.element_size())
    sizes = dict(HEAD_DIM=q.shape[3], BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=block_d)
    return dict(**sizes, num_warps=4, num_stages=max(1, min(most_stages, stages)), enable_fp_fusion=False)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Backend.linear`."""
    return skinny_product(x.flatten(0, 1), weight, bias, fixed_order=True).unflatten(0, x.shape[:2])


class DeterministicStream(TritonStream):
    """All products are skinny ones in a fixed order, those of a branch's output in parts for the next norm."""

    linear = staticmethod(_linear)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        super().__init__(hidden, eps)
        self.is_vector, self.is_skinny = False, True

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        normed = self.normed(norm)
        return skinny_product(normed.flatten(0, 1), weight, gated=True, fixed_order=True).unflatten(0, normed.shape[:2])

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        if last:  # only in a draft, whose sums may have any order
            super().add_product(x, weight, last)
        else:
            self.parts = split_product(x.flatten(0, 1), weight, fixed_order=True)


class DeterministicBackend(TritonBackend):
    """Triton kernels with one order of summation per row. The others compute each row by itself already."""

    linear = staticmethod(_linear)
    stream = staticmethod(DeterministicStream)
