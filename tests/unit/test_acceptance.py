"""Acceptance emits the target's own distribution: exact sums over all draws, of the draft and of the rule."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from enumeration import RandomLanguage, Tokens, arrivals, outcomes, p_value, sampled_trees
from faults import IN_THE_RULE
from penalty_reference import sampler as row_sampler
from torch import Tensor

from longspec.inference.acceptance import Accepted, accept
from longspec.inference.drafting import tree as tree_drafting
from longspec.inference.drafting.chain import ChainDrafter
from longspec.inference.drafting.decoder import Level
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.sampling import Sampler
from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import Branches, Tree, new_tree

VOCAB = 3
SHAPES = [(1,), (3,), (2, 2), (2, 3), (3, 1), (1, 2, 1)]
CACHE = SimpleNamespace(watch=lambda fault: None)
"""In the place of a target's cache, which languages do not have."""
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]


def build_tree(nodes: Iterable[Tokens], shape: Tokens, q: RandomLanguage | None = None) -> Proposal:
    """The proposal whose nodes are token paths, given level by level; with q, as if its nodes were sampled from it.

    A level that has fewer nodes than its width is filled with ones that have no parent, as the drafter does.
    """
    paths: list[Tokens | None] = [()]
    for level, width in enumerate(shape, start=1):
        here: list[Tokens | None] = [path for path in nodes if len(path) == level]
        paths += here + [None] * (width - len(here))
    inner = [path or () for path in paths[: len(paths) - shape[-1]]]
    levels = [level for level, width in enumerate((1, *shape)) for _ in range(width)]
    return Proposal(
        torch.tensor([[0, *(path[-1] if path else 0 for path in paths[1:])]]),
        torch.tensor([[-1, *(paths.index(path[:-1]) if path else -1 for path in paths[1:])]]),
        torch.tensor(levels),
        torch.zeros(1, len(paths), len(paths), dtype=torch.bool),
        len(shape),
        None if q is None else torch.stack([q(path) for path in inner])[None],
    )


def token_paths(proposal: Proposal) -> list[Tokens]:
    """Each node's tokens below the root."""
    paths: list[Tokens] = [()]
    for token, parent in zip(proposal.tokens[0, 1:].tolist(), proposal.parents[0, 1:].tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


def emitted(proposal: Proposal, p: RandomLanguage, sampler: Sampler) -> Tokens:
    """What a round emits where p is the target."""
    logits = torch.stack([p(path) for path in token_paths(proposal)]).log()
    accepted: Accepted = accept(proposal, logits[None], sampler)
    path = accepted.path[0, 1 : int(accepted.count) + 1]
    return (*proposal.tokens[0, path].tolist(), int(accepted.bonus))


Round = Proposal | Callable[[Sampler], Tokens]
"""A proposal that the target verifies, or what a whole round emits."""


def check_exact(p: RandomLanguage, depth: int, rounds: Iterable[tuple[float, Round]]) -> None:
    """Rounds, weighted by probability and each completed by the target, make the target's law of depth + 1 tokens."""
    law: dict[Tokens, float] = {}
    for weight, run in rounds:
        for probability, tokens in outcomes(partial(emitted, run, p) if isinstance(run, Proposal) else run):
            for sequence, rest in p.sequences(depth + 1, tokens).items():
                law[sequence] = law.get(sequence, 0.0) + weight * probability * rest
    expected = p.sequences(depth + 1)
    assert law == pytest.approx(expected | {key: 0.0 for key in law if key not in expected}, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_descending_any_tree_is_exact(shape: Tokens, seed: int) -> None:
    """A tree that was built without chance, here any tree at all."""
    p, generator = RandomLanguage(VOCAB, seed), torch.Generator().manual_seed(seed)
    nodes: list[Tokens] = []
    above: list[Tokens] = [()]
    for width in shape:
        candidates = [(*path, token) for path in above for token in range(VOCAB)]
        above = [candidates[i] for i in torch.randperm(len(candidates), generator=generator)[:width].tolist()]
        nodes += above
    check_exact(p, len(shape), [(1.0, build_tree(nodes, shape))])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rejecting_in_a_tree_sampled_without_replacement_is_exact(shape: Tokens, seed: int) -> None:
    """Summed over all trees that the draft can sample, which may run out of tokens."""
    p, q = RandomLanguage(VOCAB, seed), RandomLanguage(VOCAB, seed + 1000)
    trees = [(weight, build_tree(nodes, shape, q)) for nodes, weight in sampled_trees(q, shape).items()]
    check_exact(p, len(shape), trees)


def arrived_tree(groups: Iterable[tuple[Tokens, ...]], shape: Tokens, q: RandomLanguage) -> tuple[Tree, Proposal]:
    """The tree whose nodes arrived in this order, and the proposal of all its nodes."""
    time = {node: float(number) for number, group in enumerate(groups) for node in group}
    proposal = build_tree(time, shape, q)
    tree = new_tree(1, proposal.tokens.shape[1], True, torch.device("cpu"))
    tree.tokens.copy_(proposal.tokens)
    tree.parents.copy_(proposal.parents)
    for node, (path, parent) in enumerate(zip(token_paths(proposal), proposal.parents[0].tolist(), strict=True)):
        exists = parent >= 0 or node == 0
        tree.arrivals[0, node] = time.get(path, 0.0) if exists else torch.inf
        q_path = torch.stack([q(path[:depth])[token] for depth, token in enumerate(path)] or [torch.tensor(1.0)])
        tree.scores[0, node] = q_path.log().sum() if exists else -torch.inf
        if parent >= 0:
            tree.visible[0, node] |= tree.visible[0, parent]
    return tree, proposal


def branches_of(*chains: Tokens) -> Branches:
    """Branches with these tokens, each less probable than the one before."""
    depth = max(map(len, chains))
    tokens = torch.tensor([[(*chain, *[0] * (depth - len(chain))) for chain in chains]])
    levels = range(1, depth + 1)
    scores = [[-0.4 * d - 0.5 * k if d <= len(chain) else -torch.inf for d in levels] for k, chain in enumerate(chains)]
    return Branches(tokens, torch.tensor([scores]))


def selected_trees(
    q: RandomLanguage, shape: Tokens, nodes: int, branches: Branches | None = None
) -> Iterator[tuple[float, Proposal]]:
    """Each proposal of `nodes` selected nodes of a tree sampled from q and of branches, with its probability."""
    depth = max(len(shape), 0 if branches is None else branches.tokens.shape[2])
    law: dict[tuple[Any, ...], tuple[float, Proposal]] = {}
    for groups, weight in arrivals(q, shape).items():
        tree, whole = arrived_tree(groups, shape, q)
        selected = Backend.select_nodes(tree, whole.levels, nodes, True, branches)
        proposal = Proposal(*selected[:4], depth, whole.sampled_from, selected.wide, selected.in_branch)
        key = (*token_paths(proposal), *selected.parents[0].tolist(), *selected.in_branch[0].tolist())
        law[key] = (law[key][0] + weight if key in law else weight, proposal)
    return iter(law.values())


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize(("shape", "nodes"), [((3,), 2), ((2, 3), 4), ((3, 2), 4), ((1, 2, 1), 3)])
def test_rejecting_among_selected_nodes_is_exact(shape: Tokens, nodes: int, seed: int) -> None:
    """Summed over all trees that the draft can sample, and over the order in which their nodes arrive."""
    p, q = RandomLanguage(VOCAB, seed), RandomLanguage(VOCAB, seed + 1000)
    check_exact(p, len(shape), selected_trees(q, shape, nodes))


@pytest.mark.parametrize("seed", SEEDS[:4])
@pytest.mark.parametrize(
    ("shape", "nodes", "chains"),
    [((2,), 4, ((0, 1), (2,))), ((2, 2), 5, ((0, 1), (2,))), ((2, 3), 5, ((1, 2),)), ((2, 1), 8, ((0, 0), (1, 2)))],
)
def test_rejecting_among_nodes_and_branches_is_exact(
    shape: Tokens, nodes: int, chains: tuple[Tokens, ...], seed: int
) -> None:
    """With a budget for some of both, and without one; branches are longer than the tree, or follow it."""
    p, q, branches = RandomLanguage(VOCAB, seed), RandomLanguage(VOCAB, seed + 1000), branches_of(*chains)
    check_exact(p, max(len(shape), len(chains[0])), selected_trees(q, shape, nodes, branches))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("shape", "nodes", "branches"),
    [((3,), 2, None), ((2, 3), 4, None), ((2, 3), 5, branches_of((0, 1), (2,))), ((2,), 6, branches_of((1, 0, 1)))],
)
def test_descending_selected_nodes_is_exact(shape: Tokens, nodes: int, branches: Branches | None, seed: int) -> None:
    """Of a tree of the draft's most probable continuations and of branches."""
    p, q = RandomLanguage(VOCAB, seed), RandomLanguage(VOCAB, seed + 1000, zeros=0.0)
    tree = new_tree(1, 1 + sum(shape), False, torch.device("cpu"))
    above, levels = slice(0, 1), torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape]))
    for width in shape:
        paths = token_paths(Proposal(*tree[:2], levels, tree.visible, len(shape)))[above]
        Backend.grow_level(tree, above, width, torch.stack([q(path) for path in paths]).log()[None], None)
        above = slice(above.stop, above.stop + width)
    selected = Backend.select_nodes(tree, levels, nodes, False, branches)
    depth = max(len(shape), 0 if branches is None else branches.tokens.shape[2])
    check_exact(p, depth, [(1.0, Proposal(*selected[:4], depth))])


class LanguageModel:
    """A draft that says what a language says."""

    reads_hidden = False
    layer_inputs = ()
    ids = None
    columns = most_columns = VOCAB

    def __init__(self, language: RandomLanguage) -> None:
        self.language = language
        self.prefix: Tokens = ()

    def feature(self, cache: object) -> None: ...


class LanguageChain(LanguageModel):
    """In place of a chain's draft."""

    def next_logits(self, tokens: Tensor, step: int, cache: object, feature: None) -> Tensor:
        self.prefix = (*self.prefix[: step - 1], int(tokens)) if step else ()
        return self.language(self.prefix).log()[None]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_a_sampled_chain_is_exact(gamma: int, seed: int) -> None:
    """The drafter's own draws and the acceptance's, together."""
    p, q = RandomLanguage(VOCAB, seed), RandomLanguage(VOCAB, seed + 1000)

    def run(sampler: Sampler) -> Tokens:
        proposal = ChainDrafter(LanguageChain(q), gamma, sampler).propose(torch.zeros(1, dtype=torch.long), CACHE)  # type: ignore[arg-type]
        return emitted(proposal, p, sampler)

    check_exact(p, gamma, [(1.0, run)])


class LanguageDraft(LanguageModel):
    """In place of the tree drafter's GLIDE draft, after at most one token."""

    start = feed = None

    def level(self, level: Level, *_: object) -> Tensor:
        known = [self.language((token,) if level.depth else ()).log() for token in range(VOCAB)]
        return torch.stack(known)[level.tokens]


@pytest.mark.parametrize(("shape", "nodes"), [((2,), None), ((2, 2), None), ((2, 3), None), ((2, 3), 4)])
def test_drafted_trees_follow_the_law_that_was_integrated(
    shape: Tokens, nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 drafted trees, whole or of `nodes` nodes, against sampling without replacement; chi-square at 1e-6."""
    q, count = RandomLanguage(VOCAB, 7, zeros=0.0), 50_000
    monkeypatch.setattr(tree_drafting, "new_decoder", lambda *_: LanguageDraft(q))
    sampler = row_sampler(1.0, count).drafting()
    runner = SimpleNamespace(backend=Backend, device=torch.device("cpu"), config=SimpleNamespace(vocab_size=VOCAB))
    drafter = tree_drafting.TreeDrafter(runner, count, shape, sampler, "reject", nodes=nodes)  # type: ignore[arg-type]
    drawn = drafter.propose(torch.zeros(count, dtype=torch.long), CACHE)  # type: ignore[arg-type]
    whole = ((weight, build_tree(tree, shape, q)) for tree, weight in sampled_trees(q, shape).items())
    weights, known = zip(*(whole if nodes is None else selected_trees(q, shape, nodes)), strict=True)
    rows = torch.cat([torch.cat([tree.tokens, tree.parents], 1) for tree in [*known, drawn]])
    _, number, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    assert len(counts) == len(known), "a tree that cannot be"
    counts = counts[number[: len(known)]] - 1  # each once as a known one
    assert p_value(counts[None], torch.tensor([weights])) > 1e-6
    for tree, at in zip(known if nodes is None else (), number, strict=False):
        for row in (number[len(known) :] == at).nonzero()[:3, 0]:
            torch.testing.assert_close(drawn.sampled_from[row], tree.sampled_from[0].float())  # type: ignore[index]


CHECKS: dict[str, Callable[[int], None]] = {
    "tree": partial(test_rejecting_in_a_tree_sampled_without_replacement_is_exact, (2, 2)),
    "tree, budget": partial(test_rejecting_among_selected_nodes_is_exact, (2, 3), 4),
    "tree, lookup": partial(test_rejecting_among_nodes_and_branches_is_exact, (2, 2), 5, ((0, 1), (2,))),
    "tree, descend": partial(test_descending_any_tree_is_exact, (2, 2)),
    "tree, descend, budget": partial(test_descending_selected_nodes_is_exact, (2, 3), 4, None),
    **dict.fromkeys(("seq", "magicdec"), partial(test_a_sampled_chain_is_exact, 2)),
}
"""The test of each method, as a function of the seed."""


@pytest.mark.parametrize(("name", "method"), [(name, m) for name, fault in IN_THE_RULE.items() for m in fault.methods])
def test_planted_faults_are_seen_in_the_sums(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tests as above fail with each fault of the rule."""
    IN_THE_RULE[name].plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(2):
            CHECKS[method](seed)
