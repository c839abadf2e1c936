"""Decoding attention on a CPU in float32: compiled kernels for few queries, torch for more."""

from torch import Tensor

from longspec.kernels.native.operations import MOST_QUERIES, attention
from longspec.kernels.shared.attention import Attend
from longspec.kernels.torch.attention import SdpaAttention


class NativeAttention(SdpaAttention):
    """Decoding attention on the functions of `kernels.native`."""

    name = "native"

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        if _are_many(tree_mask):
            return super().hybrid(lengths, tree_mask)
        lengths, tree_mask = lengths.int().contiguous(), tree_mask.contiguous()

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attention(q, k, v, lengths, tree_mask, scale)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        if _are_many(q.transpose(1, 2)):
            return super().prefix(q, k, v, lengths, scale)
        return attention(q, k, v, lengths.int().contiguous(), None, scale)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        if _are_many(tree_mask):
            return super().window(q, k, v, lengths, level, tree_mask, scale)
        window = k.shape[2] - tree_mask.shape[2]
        lengths, tree_mask = lengths.int().contiguous(), tree_mask.contiguous()
        return attention(q, k, v, lengths, tree_mask, scale, window, level)


def _are_many(queries: Tensor) -> bool:
    """Whether there are too many queries [B, N, ...]."""
    return queries.shape[0] * queries.shape[1] > MOST_QUERIES
