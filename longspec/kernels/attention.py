"""The attention that decoding calls: Triton kernels on CUDA, torch's scaled_dot_product_attention elsewhere.

Shape letters: B batch, N queries (tree nodes), Hq query heads, Hkv KV heads, D head_dim, S cache slots.
q [B, Hq, N, D]; k, v [B, Hkv, S, D], last dimension contiguous; outputs [B, Hq, N, D] in q's dtype. A query that sees
no key gets 0. On CUDA nothing here waits for the device: sizes come from `max_length`, which the host knows.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.errors import UserError
from longspec.kernels.varlen import FLASH_MODULES, installed_flash_attention

logger = logging.getLogger(__name__)

FOLD_LIMIT = 32
"""Up to this many queries the CPU is faster with a group's heads as rows of one KV head."""
MIN_SPLIT = 256
"""Fewest prefix slots that are worth a split of their own."""


def hybrid_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float, max_length: int
) -> Tensor:
    """Verification attention: each node sees its row's whole prefix and, under `tree_mask`, the new nodes.

    lengths int [B]: the prefix of row b is slots 0 … lengths[b] - 1; the keys of the N nodes already lie in slots
    lengths[b] … lengths[b] + N - 1; tree_mask bool [B, N, N], True where query node i sees key node j;
    max_length: the host's upper bound of lengths. (LongSpec, arXiv 2502.17421: hybrid tree attention.)
    """
    if _use_triton(q):
        return _hybrid_triton(q, k, v, lengths, tree_mask, scale, max_length)

    def attend(count: int, q: Tensor, k: Tensor, v: Tensor, tree_mask: Tensor) -> Tensor:
        used = count + q.shape[2]
        visible = F.pad(tree_mask, (count, 0), value=True)
        return masked_attention(q, k[:, :, :used], v[:, :, :used], visible, scale)

    return _by_length(attend, lengths, q, k, v, tree_mask)


def prefix_only_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, max_length: int) -> Tensor:
    """The draft's cross-attention in decoding: every query sees its row's slots 0 … lengths[b] - 1.

    lengths int [B], 0 allowed; max_length: the host's upper bound of lengths.
    """
    if _use_triton(q):
        return _prefix_triton(q, k, v, lengths, scale, max_length)

    def attend(count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k[:, :, :count], v[:, :, :count], None, scale) if count else torch.zeros_like(q)

    return _by_length(attend, lengths, q, k, v)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of a chunk of the prompt: the N queries are those of the last N of the S slots."""
    batch, _, nodes, _ = q.shape
    start = k.shape[2] - nodes
    if _use_triton(q):
        starts = torch.full((batch,), start, dtype=torch.int32, device=q.device)
        causal = torch.ones(nodes, nodes, dtype=torch.bool, device=q.device).tril().expand(batch, -1, -1)
        return _hybrid_triton(q, k, v, starts, causal, scale, start)
    if start == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    visible = torch.ones(nodes, k.shape[2], dtype=torch.bool, device=q.device).tril(start)
    return _sdpa(q, k, v, visible.expand(batch, -1, -1), scale)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention over all S slots under mask bool [B, N, S], True = visible; every slot must hold finite values."""
    sees_any = mask.any(-1, keepdim=True)
    # Softmax over nothing is NaN, in the gradient too: such a row attends everywhere and is zeroed afterwards.
    out = _sdpa(q, k, v, mask | ~sees_any, scale)
    return out.masked_fill(~sees_any[:, None], 0.0)


def resolve_attention(requested: str | None) -> str:
    """The attention that runs where `requested` was asked for, and a log line, once, if it is another one.

    requested: a value of `attn_implementation` as configs carry it; None means "sdpa".
    Returns "flash_attention_2", "flash_attention_3", "sdpa" or "eager". Raises UserError for any other name.
    """
    name = requested or "sdpa"
    known = ("flash_attention_2", "flash_attention_3", "sdpa", "eager")
    if name not in known:
        raise UserError(f"attn_implementation: unknown value {requested!r}; choose one of {', '.join(known)}")
    if name not in FLASH_MODULES:
        return name
    used = (torch.cuda.is_available() and installed_flash_attention()) or "sdpa"
    _log_replacement(name, used)
    return used


@cache
def _log_replacement(requested: str, used: str) -> None:
    if requested != used:
        decoding = "the Triton kernels" if torch.cuda.is_available() and _triton_installed() else "sdpa"
        logger.warning("%s is not available here: training uses %s, decoding %s", requested, used, decoding)


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _use_triton(q: Tensor) -> bool:
    return q.is_cuda and _triton_installed()


def _by_length(attend: Callable[..., Tensor], lengths: Tensor, q: Tensor, *others: Tensor) -> Tensor:
    """attend(length, q, *others) on the rows of each length together, so that slots past it are never touched."""
    counts = lengths.tolist()
    if len(set(counts)) == 1:
        return attend(counts[0], q, *others)
    out = torch.empty_like(q)
    for count in set(counts):
        rows = [row for row, length in enumerate(counts) if length == count]
        index = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        out[index] = attend(count, *(x[index] for x in (q, *others)))
    return out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """torch's attention with grouped heads; mask bool [B, N, S] without fully masked rows, or None."""
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    if mask is not None and nodes > FOLD_LIMIT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=True)
    group = heads // kv_heads
    rows = q.reshape(batch, kv_heads, group * nodes, head_dim)
    row_mask = None if mask is None else mask.repeat(1, group, 1)[:, None]
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=row_mask, scale=scale).reshape(q.shape)


def _prefix_triton(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, max_length: int) -> Tensor:
    from longspec.kernels.merge import merge_states
    from longspec.kernels.prefix_attention import prefix_attention

    with torch.cuda.device(q.device):
        outs, lses = prefix_attention(q, k, v, lengths, scale, _num_splits(q, k, max_length))
        return merge_states(outs, lses, q.dtype)[0]


def _hybrid_triton(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float, max_length: int
) -> Tensor:
    from longspec.kernels.merge import merge_states
    from longspec.kernels.prefix_attention import launch_prefix_attention
    from longspec.kernels.tree_attention import launch_tree_attention

    splits = _num_splits(q, k, max_length)
    outs = torch.empty((splits + 1, *q.shape), dtype=torch.float32, device=q.device)
    lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        launch_prefix_attention(q, k, v, lengths, scale, outs[:splits], lses[:splits])
        launch_tree_attention(q, k, v, lengths, tree_mask, scale, outs[splits], lses[splits])
        return merge_states(outs, lses, q.dtype)[0]


def _num_splits(q: Tensor, k: Tensor, max_length: int) -> int:
    """Splits of the prefix that give every multiprocessor two programs, none of them shorter than MIN_SPLIT."""
    batch, heads, nodes, _ = q.shape
    kv_heads = k.shape[1]
    programs = batch * kv_heads * -(-heads // kv_heads * nodes // 64)
    wanted = -(-2 * torch.cuda.get_device_properties(q.device).multi_processor_count // programs)
    return max(1, min(wanted, -(-max_length // MIN_SPLIT)))


ATTENTIONS = ("auto", "flash", "triton", "sdpa")


class Shim:
    name, capturable = "sdpa", False

    def hybrid(self, q, k, v, lengths, tree_mask, scale):
        return hybrid_attention(q, k, v, lengths, tree_mask, scale, int(lengths.max()))

    def prefix(self, q, k, v, lengths, scale):
        return prefix_only_attention(q, k, v, lengths, scale, int(lengths.max()))

    def window(self, q, k, v, lengths, level, tree_mask, scale):
        w = k.shape[2] - tree_mask.shape[2]
        root = lengths[:, None]
        held = root - 1 - (root - 1 - torch.arange(w, device=q.device)) % w
        ring = (held >= 0) & (held >= root + level - w)
        mask = torch.cat([ring[:, None].expand(-1, q.shape[2], -1), tree_mask], -1)
        return masked_attention(q, k, v, mask, scale)

    def prefill(self, q, k, v, scale):
        return prefill_attention(q, k, v, scale)


def decoding_attention(requested, device, dtype, head_dim):
    return Shim()
