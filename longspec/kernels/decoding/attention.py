"""The attention that decoding calls: one object, chosen once, that the engine and the draft hold.

Shape letters: B batch, N queries (tree nodes), Hq query heads, Hkv KV heads, D head_dim, S cache slots, W window,
M tree nodes of the draft. q [B, Hq, N, D]; k, v [B, Hkv, S, D], last dimension contiguous; outputs [B, Hq, N, D] in
q's dtype. lengths int [B]: row b's prefix is slots 0 … lengths[b] - 1. A query that sees no key gets 0.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from longspec.errors import UserError
from longspec.kernels import BACKENDS
from longspec.kernels.decoding.attention_reference import ring_visible
from longspec.kernels.shared.device import OLDEST_GPU, describe_gpu
from longspec.kernels.training.varlen_flash import FLASH_MODULES, installed_flash_attention

logger = logging.getLogger(__name__)

MODULES = {"flash": ("triton", "fa3_fwd_interface"), "triton": ("triton",), "sdpa": ()}
"""What a backend imports; FlashAttention-3 comes in the package fa3-fwd."""
FOLD_LIMIT = 32
"""Up to this many queries the CPU is faster with a group's heads as rows of one KV head."""


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [B, Hq, T, D], k, v [B, Hkv, S, D], scale) -> [B, Hq, T, D]"""


class DecodingAttention(Protocol):
    """A backend. What lies in a cache behind the used slots, finite or not, never reaches a result."""

    name: str
    """What the prefix runs on: "flash", "triton" or "sdpa"."""
    capturable: bool
    """Whether calls may be captured in a CUDA graph: no value of `lengths` reaches the host."""

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        """The attention of one verification's layers, each to be called in turn: a node sees its row's whole prefix
        and, under `tree_mask`, the new nodes.

        The keys of the N nodes already lie in slots lengths[b] … lengths[b] + N - 1; tree_mask bool [B, N, N], True
        where query node i sees key node j. (LongSpec, arXiv 2502.17421: hybrid tree attention.)
        """

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """The draft's cross-attention: every query sees its row's prefix, which may be empty."""

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        """The draft's self-attention: N nodes of one level see a ring of accepted tokens and nodes of the tree.

        k, v [B, Hkv, W + M, D], finite: slot s < W holds the newest position p < lengths[b] with p % W == s, slot W + j
        node j. A query, at position lengths[b] + level, sees p if it is >= 0 and at most W positions back, and node j
        where tree_mask bool [B, N, M] is True.
        """

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention over all S slots, finite, under mask bool [B, N, S], True = visible."""

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of a chunk of the prompt: the N queries are those of the last N of the S slots."""


def decoding_attention(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> DecodingAttention:
    """The backend `requested`: "flash" (FlashAttention-3), "triton", "sdpa", or "auto", the fastest that runs here.

    Logs, once, which package would make "auto" faster. Raises UserError for an unknown name and for a backend that was
    asked for by name and cannot run here.
    """
    if requested not in ("auto", *BACKENDS):
        raise UserError(f"attention: unknown backend {requested!r}; choose one of auto, {', '.join(BACKENDS)}")
    if requested == "auto":
        fitting = [name for name in BACKENDS if _misfit(name, device, dtype, head_dim) is None]
        name = next(name for name in fitting if not _missing_module(name))
        _log_missing(tuple(fitting[: fitting.index(name)]), name)
    else:
        name = requested
        reason = _misfit(name, device, dtype, head_dim) or _missing_module(name)
        if reason:
            raise UserError(f"attention: {name!r} cannot run here: {reason}")
    if name == "sdpa":
        return SdpaAttention()
    from longspec.kernels.decoding.triton_attention import FlashAttention, TritonAttention

    return (FlashAttention if name == "flash" else TritonAttention)(describe_gpu(device))


def _misfit(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why no package would make the backend run, None if it fits."""
    if name == "sdpa":
        return None
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    generation = torch.cuda.get_device_capability(device)[0]
    if generation < OLDEST_GPU:
        return "it needs an Ampere GPU or a later one"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not take {dtype}"
    if name == "flash" and (dtype != torch.bfloat16 or head_dim > 256 or head_dim % 8):
        return f"it takes bfloat16 and a head_dim of 8, 16, … 256, not {dtype} and {head_dim}"
    if name == "flash" and generation != 9:
        return "it needs a Hopper GPU"
    return None


def _missing_module(name: str) -> str | None:
    missing = [module for module in MODULES[name] if not _installed(module)]
    return f"{' and '.join(missing)} cannot be imported" if missing else None


@cache
def _log_missing(faster: tuple[str, ...], used: str) -> None:
    for name in faster:
        logger.warning("decoding attention runs on %s; %s would be faster, but %s", used, name, _missing_module(name))


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class SdpaAttention:
    """Decoding attention on torch's scaled_dot_product_attention; reads `lengths` on the host."""

    name = "sdpa"
    capturable = False

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            def of_length(count: int, q: Tensor, k: Tensor, v: Tensor, tree_mask: Tensor) -> Tensor:
                used = count + q.shape[2]
                visible = F.pad(tree_mask, (count, 0), value=True)
                return masked_attention(q, k[:, :, :used], v[:, :, :used], visible, scale)

            return _by_length(of_length, lengths, q, k, v, tree_mask)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        def attend(count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _sdpa(q, k[:, :, :count], v[:, :, :count], None, scale) if count else torch.zeros_like(q)

        return _by_length(attend, lengths, q, k, v)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        ring = ring_visible(lengths, level, k.shape[2] - tree_mask.shape[2], q.shape[2])
        return masked_attention(q, k, v, torch.cat([ring, tree_mask], 2), scale)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return masked_attention(q, k, v, mask, scale)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_prefill(q, k, v, scale)


def causal_prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`DecodingAttention.prefill` on torch: its fused kernels on CUDA, which need no [N, S] mask."""
    nodes, slots = q.shape[2], k.shape[2]
    if not q.is_cuda and nodes < slots:
        visible = torch.ones(nodes, slots, dtype=torch.bool).tril(slots - nodes)
        return _sdpa(q, k, v, visible.expand(len(q), -1, -1), scale)
    if q.is_cuda and q.dtype == torch.float32:  # the fused kernel that takes fp32 has no grouped heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    bias = causal_lower_right(nodes, slots)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)


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
        on_gpu = torch.cuda.is_available()
        training = "FlashAttention-2 as torch builds it" if on_gpu and used == "sdpa" else used
        decoding = "the Triton kernels" if on_gpu and _installed("triton") else "sdpa"
        logger.warning("%s was asked for: here training uses %s, decoding %s", requested, training, decoding)


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
