"""transformers' filters with values per row: they give -inf to the tokens that they leave out; one stays, as do NaN and
infinity. Logits are fp32 or wider [B, ..., V]; values are [B, ..., 1] with 1 in every dimension but the first."""

from collections.abc import Mapping

import torch
from torch import Tensor


def keep_likely(logits: Tensor, values: Mapping[str, Tensor], largest_k: int) -> Tensor:
    """Logits after the filters in `values`, by name. largest_k: see `SamplingKind.largest_k`."""
    if "top_p" in values:
        no_top_k = torch.full_like(values["top_p"], logits.shape[-1], dtype=torch.long)
        logits = truncate(logits, values.get("top_k", no_top_k), values["top_p"])
    elif "top_k" in values:
        logits = _keep_top_k(logits, values["top_k"], largest_k)
    if "min_p" in values:
        p = logits.softmax(-1)
        logits = logits.masked_fill(p < values["min_p"] * p.amax(-1, keepdim=True), -torch.inf)
    if "typical_p" in values:
        logits = _keep_typical(logits, values["typical_p"])
    if "epsilon_cutoff" in values:
        is_dropped = (logits.softmax(-1) < values["epsilon_cutoff"]) & (logits < logits.amax(-1, keepdim=True))
        logits = logits.masked_fill(is_dropped, -torch.inf)
    return logits


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """transformers' top-k warper, then its top-p warper. top_k: int64; top_p: fp64."""
    # One sort serves both warpers. Ascending, because transformers sums the probabilities from the least likely token.
    ascending, order = logits.sort(dim=-1)
    kth = (logits.shape[-1] - top_k).clamp(min=0).expand(*logits.shape[:-1], 1)
    ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth), -torch.inf)
    mass = ascending.softmax(-1).cumsum(-1)
    is_dropped = (mass <= 1 - top_p) & (top_p < 1)
    is_dropped[..., -1] = False  # at least one token stays
    return torch.empty_like(logits).scatter(-1, order, ascending.masked_fill(is_dropped, -torch.inf))


def _keep_top_k(logits: Tensor, top_k: Tensor, largest_k: int) -> Tensor:
    """transformers' top-k warper. largest_k: the largest top_k of any row; 0 for any."""
    vocab = logits.shape[-1]
    descending = logits.topk(min(largest_k or vocab, vocab), dim=-1).values
    kth = (top_k.clamp(max=descending.shape[-1]) - 1).expand(*logits.shape[:-1], 1)
    return logits.masked_fill(logits < descending.gather(-1, kth), -torch.inf)


def _keep_typical(logits: Tensor, mass: Tensor) -> Tensor:
    """transformers' typical warper: the tokens whose surprise is closest to the entropy, up to the mass; all at 1."""
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).nansum(-1, keepdim=True)
    distance, order = (-log_p - entropy).abs().sort(dim=-1)
    last = (log_p.gather(-1, order).exp().cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    is_dropped = (distance > distance.gather(-1, last)) & (mass < 1)
    return logits.masked_fill(torch.empty_like(is_dropped).scatter(-1, order, is_dropped), -torch.inf)
