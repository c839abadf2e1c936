"""Hybrid tree attention as published, a baseline of `benchmarks.attention`.

It takes three steps: FlashAttention over the prefix, a Triton kernel over the tree, and a merge by log-sum-exp in
torch. `longspec.kernels` takes two kernel launches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.triton.attention_tiles import LOG2_E


@triton.jit
def _tree_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    mask_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    scale_log2,
    heads,
    group,
    nodes,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_DIM)
    in_tree = node < nodes
    start = tl.load(lengths_ptr + batch)
    key_offset = batch * stride_kb + head // group * stride_kh + start.to(tl.int64) * stride_ks
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    q = tl.load(q_base + node[:, None] * stride_qn + dim[None, :], mask=in_tree[:, None], other=0.0)
    row_max = tl.full([BLOCK], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for first in range(0, nodes, BLOCK):
        key = first + tl.arange(0, BLOCK)
        offsets = key_offset + key[:, None] * stride_ks + dim[None, :]
        k = tl.load(k_ptr + offsets, mask=(key < nodes)[:, None], other=0.0)
        v = tl.load(v_ptr + offsets, mask=(key < nodes)[:, None], other=0.0)
        seen_ptr = mask_ptr + (batch * nodes + node)[:, None] * nodes + key[None, :]
        seen = tl.load(seen_ptr, mask=in_tree[:, None] & (key < nodes)[None, :], other=0)
        scores = tl.where(seen != 0, tl.dot(q, tl.trans(k)) * scale_log2, -1.0e30)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.where(seen != 0, tl.exp2(scores - new_max[:, None]), 0.0)
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        row_max = new_max
    row = (batch * nodes + node) * heads + head
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dim[None, :], acc / row_sum[:, None], mask=in_tree[:, None])
    tl.store(lse_ptr + (batch * heads + head) * nodes + node, (row_max + tl.log2(row_sum)) / 1.44269504, mask=in_tree)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention among the N tree nodes, whose keys are in slots lengths[b] to lengths[b] + N - 1 of row b.

    q [B, H, N, D]; k, v [B, K, S, D] with equal strides; lengths int32 [B]; tree_mask contiguous bool [B, N, N], in
    which every node sees itself. Returns the output [B, N, H, D] and its natural log-sum-exp, fp32 [B, H, N].
    """
    batch, heads, nodes, head_dim = q.shape
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, nodes), dtype=torch.float32, device=q.device)
    block = 64
    _tree_kernel[(triton.cdiv(nodes, block), batch * heads)](
        q,
        k,
        v,
        lengths,
        tree_mask.view(torch.uint8),
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        scale * LOG2_E,
        heads,
        heads // k.shape[1],
        nodes,
        HEAD_DIM=head_dim,
        BLOCK=block,
    )
    return out, lse


def published_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float) -> Tensor:
    """Verification attention [B, N, H, D]; takes the arguments of `tree_attention`. Needs the package fa3-fwd."""
    import fa3_fwd_interface

    prefix, prefix_lse, *_ = fa3_fwd_interface.flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q, k, v)), cache_seqlens=lengths, softmax_scale=scale, return_softmax_lse=True
    )
    tree, tree_lse = tree_attention(q, k, v, lengths, tree_mask, scale)
    # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b) weights the prefix.
    share = torch.sigmoid(prefix_lse - tree_lse).transpose(1, 2).unsqueeze(-1)
    return (share * prefix + (1 - share) * tree).to(q.dtype)
