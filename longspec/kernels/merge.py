"""Merge partial attentions over disjoint keys by their log-sum-exp.

For two parts this is o = sigmoid(lse_1 - lse_2) * o_1 + (1 - sigmoid(lse_1 - lse_2)) * o_2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(
    outs_ptr,
    lses_ptr,
    out_ptr,
    lse_ptr,
    num_parts,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dim = tl.arange(0, BLOCK_D)
    in_rows = row < num_rows
    in_tile = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    running_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for part in range(0, num_parts):
        part_row = part * num_rows + row
        lse = tl.load(lses_ptr + part_row, mask=in_rows, other=float("-inf"))
        new_max = tl.maximum(running_max, lse)
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp(lse - finite_max)
        decay = tl.exp(running_max - finite_max)
        # An empty part is not even read: its output may hold anything.
        in_part = in_tile & (weight > 0.0)[:, None]
        part_offsets = part_row[:, None] * HEAD_DIM + dim[None, :]
        part_out = tl.load(outs_ptr + part_offsets, mask=in_part, other=0.0)
        acc = acc * decay[:, None] + part_out.to(tl.float32) * weight[:, None]
        total = total * decay + weight
        running_max = new_max

    divisor = tl.where(total > 0.0, total, 1.0)
    tl.store(lse_ptr + row, running_max + tl.log(divisor), mask=in_rows)
    offsets = row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + offsets, acc / divisor[:, None], mask=in_tile)


def merge_states(outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Attention over all keys from P >= 1 attentions over parts of them.

    outs [P, ..., D]; lses fp32 [P, ...], natural log, -inf for a part that saw no key. Returns o [..., D] in `dtype`
    (default: that of outs) and lse fp32 [...]; where every part is -inf, o is 0 and lse -inf.
    """
    outs, lses = outs.contiguous(), lses.contiguous()
    head_dim, num_rows = outs.shape[-1], lses[0].numel()
    out = torch.empty(outs.shape[1:], dtype=dtype or outs.dtype, device=outs.device)
    lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=lses.device)
    block_d = triton.next_power_of_2(head_dim)
    block_r = max(1, 2048 // block_d)
    _merge_kernel[(triton.cdiv(num_rows, block_r),)](
        outs,
        lses,
        out,
        lse,
        outs.shape[0],
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
    )
    return out, lse
