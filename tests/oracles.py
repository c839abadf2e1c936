"""Drafters that know the target's continuation down to a planned depth, and passes that training and decoding share."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from random import Random
from typing import Any

import torch
from pairs import Handed, padded
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal, WrappedDrafter
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY, Sampler
from longspec.models.glide import GlideMixin

Plan = Sequence[Sequence[int]]
"""plan[round][row] is the number of draft tokens to be accepted. The plan repeats after its last round."""


class Oracle(WrappedDrafter):
    """Wraps a drafter, records the number of accepted tokens and, unless the plan is empty, replaces proposed tokens.

    The shape and the branches of a proposal stay as the drafter chose them.
    """

    def __init__(
        self, drafter: Drafter, prompt_lengths: Sequence[int], truth: Sequence[Sequence[int]], plan: Plan, vocab: int
    ) -> None:
        """truth: the continuation of each row from its first new token, as long as any round looks ahead."""
        super().__init__(drafter)
        self.prompt_lengths, self.truth, self.plan, self.vocab = prompt_lengths, truth, plan, vocab
        self.random = Random(5)
        self.rounds = 0
        self.accepted: list[list[int]] = [[] for _ in prompt_lengths]
        """Number of draft tokens that each pass accepted, by row."""
        self.planted: list[list[int]] = [[] for _ in prompt_lengths]
        """Number of draft tokens that each pass should accept, by row: the planned one, or fewer if the tree has no
        node of that level."""

    def share(self, rows: slice, sampler: Sampler) -> Drafter:
        return self.drafter.share(rows, sampler)  # to start these rows

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        proposal = self.drafter.propose(root, cache)
        if self.plan:
            planned = self.plan[self.rounds % len(self.plan)]
            for row, length in enumerate(cache.lengths.tolist()):
                self._plant(proposal, row, self.truth[row][length - self.prompt_lengths[row] :], planned[row])
        self.rounds += 1
        return proposal

    def _plant(self, proposal: Proposal, row: int, ahead: Sequence[int], planned: int) -> None:
        """Put `ahead`, the true tokens starting at the root's, on the path to a random node of level `planned`.

        Every other child of a node on the path is wrong. Tokens further from the path are right or wrong at random;
        acceptance never reaches them.
        """
        levels = proposal.levels.expand_as(proposal.tokens)[row].tolist()
        parents = proposal.parents[row].tolist()
        linked = [node for node, parent in enumerate(parents) if parent >= 0 or node == 0]
        deepest = max(levels[node] for node in linked if levels[node] <= planned)
        node = self.random.choice([node for node in linked if levels[node] == deepest])
        self.planted[row].append(deepest)
        path = {0}
        while node > 0:
            path.add(node)
            node = parents[node]
        for node, level in enumerate(levels[1:], start=1):
            right = node in path or (parents[node] not in path and self.random.random() < 0.5)
            proposal.tokens[row, node] = ahead[level] if right else (ahead[level] + 1) % self.vocab

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, *states: Tensor) -> None:
        for accepted, count in zip(self.accepted, valid.sum(1).tolist(), strict=True):
            if count:
                accepted.append(count - 1)
        super().feed(tokens, positions, valid, *states)


class DeviceOracle(WrappedDrafter):
    """A variant of `Oracle` made of tensor operations, so that its rounds can be captured in a CUDA graph.

    The path to the last node of the planned level has the true tokens; all other nodes have wrong tokens.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: Sequence[int],
        prompt_lengths: Sequence[int],
        truth: Tensor,
        plan: Plan,
        vocab: int,
    ) -> None:
        """shape: nodes per level of the drafter's trees; truth: LongTensor [B, tokens]."""
        super().__init__(drafter)
        self.truth, self.vocab = truth, vocab
        self.prompt_lengths = torch.tensor(prompt_lengths, device=truth.device)[:, None]
        self.plan = torch.tensor(plan, device=truth.device)
        self.last_of_level = torch.tensor([0, *accumulate(shape)], device=truth.device)
        self.rounds = torch.zeros(1, dtype=torch.long, device=truth.device)

    share = Oracle.share

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        proposal = self.drafter.propose(root, cache)
        planned = self.plan.index_select(0, self.rounds % len(self.plan))[0]
        last_of_level = self.last_of_level[planned]
        on_path = proposal.visible.gather(1, last_of_level[:, None, None].expand(-1, 1, proposal.visible.shape[2]))
        ahead = cache.lengths[:, None] - self.prompt_lengths + proposal.levels
        right = self.truth.gather(1, ahead.clamp(0, self.truth.shape[1] - 1))
        proposal.tokens.copy_(torch.where(on_path[:, 0], right, (right + 1) % self.vocab))
        proposal.tokens[:, 0] = root
        self.rounds += 1
        return proposal


def passes_of(accepted: Iterable[int], length: int, depth: int) -> tuple[list[int], list[int]]:
    """The passes of a row that has `length` new tokens, and how many of them emit at least 1, 2, ..., `depth` draft
    tokens.

    accepted: draft tokens accepted per pass. Passes after the one that reaches `length` are dropped. The row starts
    with one token, which prefill chose.
    """
    passes, by_depth, tokens = [], [0] * depth, 1
    for count in accepted:
        if tokens == length:
            break
        passes.append(count)
        emitted = min(count + 1, length - tokens)
        tokens += emitted
        for d in range(min(count, emitted)):
            by_depth[d] += 1
    return passes, by_depth


def training_pass(
    model: GlideMixin,
    segments: Sequence[Tensor],
    lags: Tensor | None,
    pick: Callable[..., Any],
    positions: Sequence[Tensor] | None = None,
    rows: int = 1,
) -> Any:
    """The training forward over segments of tokens, packed into `rows` rows, with `Handed(pick)`."""
    tokens, device = torch.cat(list(segments)).view(rows, -1), segments[0].device
    at = torch.cat(list(positions or [torch.arange(len(segment)) for segment in segments])).view(rows, -1)
    borders = torch.tensor([0, *accumulate(map(len, segments))], dtype=torch.int32)
    objective = Handed(pick)
    return model(tokens, labels=tokens, position_ids=at.to(device), cu_seqlens=borders, lags=lags, objective=objective)


@torch.no_grad()
def training_logits(model: GlideMixin, tokens: Tensor, lag: int | None) -> Tensor:
    """The training forward's logits [T, Vd] over one segment, tokens [T], of the draft's own head if it has one. lag:
    None for the base variant."""
    head = model.draft_model.head or model.lm_head
    return training_pass(model, [tokens], None if lag is None else torch.tensor([lag]), lambda x, *_: head(x)[0])


def prefilled(
    model: GlideMixin, prompts: list[Tensor], drafter: Drafter, sampler: Sampler = GREEDY, new_tokens: int = 16
) -> StaticBatch:
    """The batch of some prompts after their prefill, with room for `new_tokens` per row."""
    rows, _ = padded(prompts)
    engine = StaticBatch(Runner(model), drafter, sampler, rows, [len(p) for p in prompts], new_tokens)
    engine.prefill()
    return engine


def compare_trees(model: GlideMixin, prompts: list[Tensor], tolerance: dict[str, Any]) -> None:
    """Each node of a proposed tree has the training forward's logits over the prompt and the node's own ancestors."""
    drafter = TreeDrafter(Runner(model), len(prompts), shape=(3, 5, 4, 1), sampler=GREEDY, tree_rule="descend")
    levels: list[Tensor] = []
    level: Callable[..., Tensor] = drafter.draft.level
    drafter.draft.level = lambda *args: levels.append(level(*args)) or levels[-1]  # type: ignore[method-assign]
    engine = prefilled(model, prompts, drafter)
    proposal = drafter.propose(engine.root, engine.cache)
    logits = torch.cat(levels, dim=1)
    for b, prompt in enumerate(prompts):
        for node in range(logits.shape[1]):
            path = proposal.tokens[b, proposal.visible[b, node]]
            expected = training_logits(model, torch.cat([prompt, path]), int(proposal.levels[node]) + 1)[-1]
            torch.testing.assert_close(logits[b, node], expected, **tolerance, msg=f"row {b}, node {node}")
