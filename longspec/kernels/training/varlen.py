"""Attention of training over packed segments; differentiable.

Shape letters: N flattened tokens, S segments, Hq query heads, Hkv KV heads, D head_dim. Half precision on CUDA runs on
FlashAttention, all else on torch's own attention over padded segments; no path has a mask of tokens x tokens.
"""

from torch import Tensor

from longspec.kernels.training import varlen_flash, varlen_padded
from longspec.kernels.training.segments import BLOCK, Segments


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    use_flash: bool = True,
) -> Tensor:
    """Causal attention within each segment, with a window, a lag per segment, or both.

    q [N, Hq, D]; k, v [N, Hkv, D]. The query at offset i of a segment sees keys at offsets i - window … i - lag (flash
    noisy training is a lag without a window). use_flash: whether to run flash-attn where it is installed.
    Returns o [N, Hq, D]; a query that sees nothing gets 0. Raises ValueError for segments of another number of tokens.
    """
    segments.check(len(q))
    if varlen_flash.takes(q, segments, window):
        return varlen_flash.attention(q, k, v, segments, scale, window, use_flash)
    return varlen_padded.attention(q, k, v, segments, scale, window)


def block_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int = BLOCK) -> Tensor:
    """GLIDE's block cross-attention: query i of a segment sees keys j with j // block < i // block.

    Shapes as in `varlen_attention`, lags do not count; the first block of a segment sees nothing and gets 0.
    """
    segments.check(len(q))
    # Whatever a query sees, it sees all that lies a block behind it.
    lagging = segments.lagging([block] * len(segments.lengths))
    if varlen_flash.takes(q, lagging, None):
        return varlen_flash.block_attention(q, k, v, lagging, scale, block)
    return varlen_padded.block_attention(q, k, v, lagging, scale, block)
