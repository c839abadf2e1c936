"""Penalties: changes of the logits that depend on the tokens before them, with settings per row.

Each node of a tree sees the row's text up to the root and its own ancestors. A repetition penalty, n-grams and the
contexts of rules look at prompt and answer, as in transformers; presence and frequency penalties count the tokens of
the answer alone, as in OpenAI's API and vLLM. In this order, with logits x in fp32 or wider:

    rules           x + bias
    repetition r    x * r if x < 0, else x / r, for tokens in the text
    presence p,     x - f * count - p * (count > 0)
    frequency f
    n-grams         minus infinity for tokens that would repeat one

At neutral settings a row's logits keep their values. No operation waits for the device, and all shapes are static.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.inference.request import PenaltyKind
from longspec.inference.row_settings import ANY_TOKEN, NO_TOKEN, PenaltyRows

if TYPE_CHECKING:
    from longspec.inference.drafting.proposal import Proposal

DRAFT_LEAST = -1e4
"""Bias of banned tokens in the draft's logits. Finite, because a draft with a vocabulary list may have no others."""


class RowTerms(NamedTuple):
    """What the text up to the root does to each of C logits of a row. Nodes below the root differ in few of them."""

    factors: Tensor
    """fp64 [B, 3]: see `PenaltyRows.factors`."""
    seen: Tensor | None
    """bool [B, C]: whether the text holds the token; None without repetition penalties."""
    counts: Tensor | None
    """fp32 [B, C]: how often the answer holds it; None without presence and frequency penalties."""
    bias: Tensor | None = None
    """fp32 [B, C]: rules without a context, for drafting alone; None without rules."""

    @classmethod
    def read(cls, rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, vocab: int) -> RowTerms:
        """positions: int [B], those of the roots."""
        history = rows.history
        slots = torch.arange(history.shape[1], device=history.device)
        in_text = slots <= positions[:, None]
        seen = counts = None
        if kind.repetition:
            seen = torch.zeros(len(history), vocab, dtype=torch.bool, device=history.device)
            seen.scatter_(1, history.where(in_text, history[:, :1]), True)  # the first token is always in the text
        if kind.counts:
            in_answer = in_text & (slots >= rows.prompt_lengths[:, None])
            counts = torch.zeros(len(history), vocab, device=history.device)
            counts.scatter_add_(1, history, in_answer.float())
        return cls(rows.factors, seen, counts)

    @classmethod
    def of_draft(
        cls, rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, vocab: int, ids: Tensor | None
    ) -> RowTerms:
        """With biases. ids: LongTensor [B, C], the token of each column; None if columns are tokens."""
        terms = cls.read(rows, kind, positions, vocab)
        if kind.rules:
            number = slice(kind.rules)
            applies = (positions - rows.prompt_lengths + 1)[:, None] < rows.rule_ends[:, number]
            applies &= (rows.rule_contexts[:, number] == ANY_TOKEN).all(2)
            biases = rows.rule_biases[:, number].where(applies, 0).clamp(min=DRAFT_LEAST)
            bias = biases.new_zeros(len(positions), vocab).scatter_add_(1, rows.rule_tokens[:, number], biases)
            terms = terms._replace(bias=bias)
        if ids is None:
            return terms
        return cls(terms.factors, *(None if values is None else values.gather(1, ids) for values in terms[1:]))

    def applied(self, logits: Tensor) -> Tensor:
        """Logits [B, ..., C] in fp32 or wider, changed."""

        def wide(values: Tensor) -> Tensor:
            return values.view(len(values), *[1] * (logits.dim() - 2), values.shape[1])

        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.bias is not None:
            x = x + wide(self.bias)
        seen, counts = (None if values is None else wide(values) for values in (self.seen, self.counts))
        return penalized(x, seen, counts, self.factors)


def penalized(x: Tensor, seen: Tensor | None, counts: Tensor | None, factors: Tensor) -> Tensor:
    """Logits x [B, ..., V] after penalties. seen and counts expand to the shape of x; factors: fp64 [B, 3]."""
    repetition, presence, frequency = (
        values.to(x.dtype).view(-1, *[1] * (x.dim() - 1)) for values in factors.unbind(1)
    )
    if seen is not None:
        x = torch.where(seen, torch.where(x < 0, x * repetition, x / repetition), x)
    if counts is not None:
        x = x - (frequency * counts + presence * (counts > 0))
    return x


class Nodes(NamedTuple):
    """The texts of N nodes, as far as they differ from that of their root."""

    levels: Tensor
    """LongTensor [B, N]: the depth of each node."""
    paths: Tensor
    """LongTensor [B, N, D]: the token at each depth from 1 on, the node's own last; then NO_TOKEN."""

    @classmethod
    def read(cls, proposal: Proposal) -> Nodes:
        tokens, depth = proposal.tokens, proposal.depth
        batch, count = tokens.shape
        # Nodes that only fill up a tree can be deeper than its longest path; nothing follows them.
        levels = proposal.levels.expand(batch, count).clamp(max=depth)
        # Column 0 takes the root, which is part of the history, and all nodes that are no ancestors.
        depths = levels[:, None].expand(-1, count, -1).where(proposal.visible, 0)
        paths = tokens.new_full((batch, count, depth + 1), NO_TOKEN)
        paths.scatter_(2, depths, tokens[:, None].expand(-1, count, -1))
        return cls(levels, paths[..., 1:])

    @classmethod
    def roots(cls, like: Tensor) -> Nodes:
        """The roots alone; like: [B, ...]."""
        levels = torch.zeros(len(like), 1, dtype=torch.long, device=like.device)
        return cls(levels, levels[..., None][..., :0])


def penalize(rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, logits: Tensor, nodes: Nodes) -> Tensor:
    """The target's logits [B, N, V] at all nodes, changed; in fp32 or wider. positions: int [B], those of the roots."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    positions = positions.long()
    # The newest tokens up to the root, then the path of each node, LongTensor [B, N, window + D].
    places = positions[:, None] + torch.arange(1 - kind.window, 1, device=x.device)
    newest = rows.history.gather(1, places.clamp(min=0)).where(places >= 0, NO_TOKEN)
    text = torch.cat([newest[:, None].expand(-1, nodes.paths.shape[1], -1), nodes.paths], 2)
    ends = kind.window + nodes.levels[..., None]
    context = text.gather(2, ends - 1 - torch.arange(kind.window, device=x.device))
    if kind.rules:
        _add_rules(x, rows, kind, positions, nodes, context)
    if kind.repetition or kind.counts:
        x = _penalize_tokens(x, rows, kind, positions, nodes)
    if kind.ngram:
        _ban_ngrams(x, rows, kind, positions, nodes, text, context)
    return x


def _add_rules(
    x: Tensor, rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, nodes: Nodes, context: Tensor
) -> None:
    """Add the biases of the rules that apply. context: LongTensor [B, N, ...], the text from its last token on."""
    new_tokens = (positions - rows.prompt_lengths + 1)[:, None] + nodes.levels
    applies = new_tokens[..., None] < rows.rule_ends[:, None, : kind.rules]
    for back in range(kind.context):
        token = rows.rule_contexts[:, None, : kind.rules, back]
        applies &= (token == context[..., back, None]) | (token == ANY_TOKEN)
    biases = rows.rule_biases[:, None, : kind.rules].to(x.dtype).where(applies, 0)
    x.scatter_add_(2, rows.rule_tokens[:, None, : kind.rules].expand_as(biases), biases)


def _penalize_tokens(x: Tensor, rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, nodes: Nodes) -> Tensor:
    """`penalized` with the text of each node."""
    terms = RowTerms.read(rows, kind, positions, x.shape[2])
    # Where a path ends, the root's token takes the place: it is in every text, and its logit is computed like others.
    root = rows.history.gather(1, positions[:, None])[..., None]
    tokens = nodes.paths.where(nodes.paths != NO_TOKEN, root)
    before = x.gather(2, tokens)
    result = terms.applied(x)
    if tokens.shape[2]:
        own = None
        if terms.counts is not None:
            repeats = (tokens[..., None] == nodes.paths[..., None, :]).sum(3)
            own = terms.counts[:, None].expand(-1, x.shape[1], -1).gather(2, tokens) + repeats
        seen = None if terms.seen is None else torch.ones_like(tokens, dtype=torch.bool)
        result.scatter_(2, tokens, penalized(before, seen, own, rows.factors))
    return result


def _ban_ngrams(
    x: Tensor, rows: PenaltyRows, kind: PenaltyKind, positions: Tensor, nodes: Nodes, text: Tensor, context: Tensor
) -> None:
    """Ban the tokens that followed an earlier occurrence of a node's newest n - 1 tokens."""
    sizes, depth = rows.ngram_sizes[:, None, None], nodes.paths.shape[2]
    slots = torch.arange(rows.history.shape[1], device=x.device)
    # Whether the token in each slot of the history, and at each depth of the path, completes an n-gram.
    old = (slots <= positions[:, None])[:, None] & (slots >= sizes - 1) & (sizes > 0)
    new = (torch.arange(1, depth + 1, device=x.device) <= nodes.levels[..., None]) & (sizes > 0)
    for back in range(1, kind.ngram):
        token = context[..., back - 1, None]
        is_longer = back >= sizes
        earlier = F.pad(rows.history, (back, 0), value=NO_TOKEN)[:, None, : len(slots)]
        old = old & ((earlier == token) & (token >= 0) | is_longer)
        start = kind.window - back
        new = new & ((text[..., start : start + depth] == token) & (token >= 0) | is_longer)
    for tokens, banned in ((rows.history[:, None], old), (nodes.paths.clamp(min=0), new)):
        banned = banned.expand(*x.shape[:2], -1)
        bias = torch.zeros_like(banned, dtype=x.dtype).masked_fill_(banned, -torch.inf)
        x.scatter_add_(2, tokens.expand_as(banned), bias)
