"""Prompt lookup, lookup branches and simulated rounds of lookup against plain searches, row by row."""

import math
import os
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longspec.inference.adaptive.lookup_trace import LookupTrace, TrackedMean
from longspec.inference.drafting import lookup
from longspec.inference.drafting.lookup import LookupBranches, LookupDrafter, TokenHistory
from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import LookupState

GAMMA, POSITIONS = 4, 64


def plain_search(tokens: list[int], count: int = GAMMA) -> list[int]:
    """Up to `count` tokens known to follow the latest of the places that match the end of `tokens` furthest."""
    best, following = 0, []
    for place in range(len(tokens) - 1):
        length = 0
        while length < lookup.LONGEST_MATCH and place - length >= 0 and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best:
            best, following = length, tokens[place + 1 : place + 1 + count]
    return following


@pytest.mark.parametrize("vocab", [2, 4, 20])
def test_proposal_is_what_a_plain_search_finds(vocab: int, device: str) -> None:
    """Ragged rows with padding that would match, fed round by round with different counts."""
    generator = torch.Generator().manual_seed(vocab)
    lengths = [1, 7, 20]
    prompts = torch.randint(vocab, (3, 20), generator=generator)
    rows = [prompts[b, :length].tolist() for b, length in enumerate(lengths)]
    drafter = LookupDrafter(TokenHistory(3, torch.device(device)), GAMMA)
    drafter.reserve(POSITIONS)
    drafter.start(prompts.to(device), torch.tensor(lengths, device=device))
    cache = SimpleNamespace(lengths=torch.tensor(lengths, dtype=torch.int32, device=device))
    root = torch.randint(vocab, (3,), generator=generator)
    compared = 0
    for step in range(8):
        proposal = drafter.propose(root.to(device), cache)  # type: ignore[arg-type]
        assert proposal.tokens[:, 0].tolist() == root.tolist() and proposal.sampled_from is None
        for b, row in enumerate(rows):
            expected = plain_search([*row, int(root[b])])
            assert proposal.tokens[b, 1 : 1 + len(expected)].tolist() == expected
            compared += len(expected)
        path = torch.cat([root[:, None], torch.randint(vocab, (3, GAMMA), generator=generator)], 1)
        counts = torch.tensor([step % 3, 1, GAMMA + 1 if step % 2 else 0])
        steps = torch.arange(GAMMA + 1)
        positions = cache.lengths[:, None].cpu() + steps
        drafter.feed(path.to(device), positions.to(device), (steps < counts[:, None]).to(device))
        cache.lengths += counts.to(device, torch.int32)
        for b, count in enumerate(counts.tolist()):
            rows[b] += path[b, :count].tolist()
        root = torch.where(counts > 0, torch.randint(vocab, (3,), generator=generator), root)
    assert compared > 20


def test_a_proposal_does_not_depend_on_what_a_row_held_before(device: str) -> None:
    """The match ends at the root, so the chain reads past it."""
    cache, root = SimpleNamespace(lengths=torch.tensor([3], device=device)), torch.tensor([7], device=device)
    proposals = []
    for former in ([], [[5] * POSITIONS]):
        drafter = LookupDrafter(TokenHistory(1, torch.device(device)), GAMMA)
        drafter.reserve(POSITIONS)
        for prompt in (*former, [7, 7, 7]):
            tokens = torch.tensor([prompt], device=device)
            drafter.start(tokens, torch.tensor([len(prompt)], device=device))
        proposals.append(drafter.propose(root, cache).tokens.tolist())  # type: ignore[arg-type]
    assert proposals[0] == proposals[1] == [[7, 7, 0, 0, 0]]


class PlainBranches:
    """The branches of one row, from lists of tokens."""

    def __init__(self, depth: int) -> None:
        self.sizes = [min(size, depth) for size in lookup.BRANCH_SIZES]
        self.hits, self.trials = [0] * len(lookup.PRIORS), [0] * len(lookup.PRIORS)
        self.former: list[tuple[int, list[int]]] = []
        self.known = 0

    def propose(self, tokens: list[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probabilities of each branch after `tokens`; counts the former ones."""
        for length, branch in self.former:
            for number, (token, truth) in enumerate(zip(branch, tokens[self.known :], strict=False)):
                bucket = min(length + number, len(lookup.PRIORS)) - 1
                self.trials[bucket] += 1
                self.hits[bucket] += token == truth
                if token != truth:
                    break
        matches = []
        for place in range(len(tokens) - 1):
            length = 0
            while length < len(lookup.PRIORS) and length <= place and tokens[place - length] == tokens[-1 - length]:
                length += 1
            matches.append((length, place))
        self.former, self.known, found, taken = [], len(tokens), [], set()
        for size in self.sizes:
            length, place = max((m for m in matches if m[0] and tokens[m[1] + 1] not in taken), default=(0, 0))
            if not length:
                break
            after = tokens[place + 1 :]
            branch = [after[number % len(after)] for number in range(size)]
            taken.add(branch[0])
            buckets = [min(length + number, len(lookup.PRIORS)) - 1 for number in range(size)]
            rates = [
                (self.hits[b] + lookup.PRIOR_WEIGHT * lookup.PRIORS[b]) / (self.trials[b] + lookup.PRIOR_WEIGHT)
                for b in buckets
            ]
            found.append((branch, [sum(map(math.log, rates[: number + 1])) for number in range(size)]))
            self.former.append((length, branch))
        return found


@pytest.mark.parametrize(("vocab", "depth"), [(2, 12), (4, 3), (30, 12)])
def test_branches_are_what_a_plain_search_finds(vocab: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows that repeat themselves, fed with different counts; in some rounds the kernel is compared."""
    generator = torch.Generator().manual_seed(vocab)
    lengths = [1, 9, 40]
    text = torch.randint(vocab, (3, 25), generator=generator).repeat(1, 8)
    noise = torch.rand(text.shape, generator=generator) < 0.05
    text[noise] = torch.randint(vocab, (int(noise.sum()),), generator=generator)
    model = SimpleNamespace(draft_model=SimpleNamespace(window=depth + 1))
    runner = SimpleNamespace(backend=Backend, device=torch.device("cpu"), model=model)
    history = TokenHistory(3, torch.device("cpu"))
    branches = LookupBranches(runner, history)  # type: ignore[arg-type]
    plain = [PlainBranches(depth) for _ in lengths]
    history.reserve(256)
    history.start(text[:, :40], torch.tensor(lengths))
    root_at, seen = torch.tensor(lengths), 0
    for step in range(14):
        root = text.gather(1, root_at[:, None])[:, 0]
        twin = LookupState(*(values.clone() for values in branches.state))
        got = branches.propose(root, root_at.int())
        if os.environ.get("TRITON_INTERPRET") == "1" and step % 7 == 3:
            from longspec.kernels.triton import lookup_branches

            monkeypatch.setattr(lookup_branches, "CHUNK", 64)
            lookup_branches.extend_branches(twin, root, root_at.int(), branches.sizes, lookup.PRIOR_WEIGHT)
            for mine, reference in zip(twin, branches.state, strict=True):
                where = twin.match_lengths > 0 if mine is twin.tokens else ...
                torch.testing.assert_close(mine[where], reference[where])
        for b, end in enumerate(root_at.tolist()):
            expected = plain[b].propose(text[b, : end + 1].tolist())
            assert [n > 0 for n in branches.state.match_lengths[b].tolist()] == [k < len(expected) for k in range(2)]
            for k, (tokens, scores) in enumerate(expected):
                assert got.tokens[b, k, : len(tokens)].tolist() == tokens
                assert got.scores[b, k, : len(tokens)].tolist() == pytest.approx(scores, abs=1e-4)
                assert got.scores[b, k, len(tokens) :].isinf().all()
                seen += 1
        counts = torch.tensor([step % 4, 1 + step % 2 * 12, 5 if step % 3 else 0])
        steps = torch.arange(14)
        positions = (root_at[:, None] + steps).clamp(max=199)
        history.feed(text.gather(1, positions), positions, steps < counts[:, None])
        root_at = root_at + counts
    assert seen > 40 and branches.state.trials.sum() > 40
    branches.start(text[:, :40], torch.tensor(lengths))
    assert not branches.state.trials.any() and not branches.state.match_lengths.any()


@pytest.mark.parametrize("vocab", [2, 6, 300])
def test_simulated_rounds_are_those_of_a_plain_search(vocab: int) -> None:
    random, depths = Random(vocab), (4, 15)
    text = [random.randrange(vocab) for _ in range(random.randrange(1, 30))]
    trace = LookupTrace(depths, np.array(text), 1, 1.2, 4.0)
    text.append(1)
    means = [TrackedMean(1.2, 4.0) for _ in depths]
    chains, matched = [plain_search(text, depth) for depth in depths], [0, 0]
    for _ in range(300):
        read = len(text)
        for _ in range(random.choice((1, 1, 2, 6))):
            # Half of the text continues what it copies.
            text.append(text[len(text) // 3] if random.random() < 0.5 else random.randrange(vocab))
            for number, depth in enumerate(depths):
                if chains[number][matched[number] :][:1] == text[-1:]:
                    matched[number] += 1
                else:
                    means[number].add(matched[number] + 1)
                    chains[number], matched[number] = plain_search(text, depth), 0
        trace.extend(text[read:])
        assert [mean.value for mean in trace.means] == [mean.value for mean in means]
    assert trace.tokens.tolist() == text


def test_an_observation_of_many_rows_outweighs_a_prior_as_those_of_each_row() -> None:
    together, apart = TrackedMean(2.0, 4.0), TrackedMean(2.0, 4.0)
    together.add(1.5, 8)
    for _ in range(8):
        apart.add(1.5)
    assert together.value == pytest.approx(apart.value) == pytest.approx((4 * 2.0 + 8 * 1.5) / 12)
