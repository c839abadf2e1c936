"""Prompt lookup against a plain search, row by row."""

from types import SimpleNamespace

import pytest
import torch

from longspec.inference.drafting.lookup import LONGEST_MATCH, LookupDrafter

GAMMA, POSITIONS = 4, 64


def plain_search(tokens: list[int]) -> list[int]:
    """What is known to follow the latest of the places that match the end of `tokens` furthest."""
    best, following = 0, []
    for place in range(len(tokens) - 1):
        length = 0
        while length < LONGEST_MATCH and place - length >= 0 and tokens[place - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best:
            best, following = length, tokens[place + 1 : place + 1 + GAMMA]
    return following


@pytest.mark.parametrize("vocab", [2, 4, 20])
def test_proposal_is_what_a_plain_search_finds(vocab: int, device: str) -> None:
    """Ragged rows with padding that would match, fed round by round with different counts."""
    generator = torch.Generator().manual_seed(vocab)
    lengths = [1, 7, 20]
    prompts = torch.randint(vocab, (3, 20), generator=generator)
    rows = [prompts[b, :length].tolist() for b, length in enumerate(lengths)]
    drafter = LookupDrafter(3, GAMMA, torch.device(device))
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
        drafter = LookupDrafter(1, GAMMA, torch.device(device))
        drafter.reserve(POSITIONS)
        for prompt in (*former, [7, 7, 7]):
            tokens = torch.tensor([prompt], device=device)
            drafter.start(tokens, torch.tensor([len(prompt)], device=device))
        proposals.append(drafter.propose(root, cache).tokens.tolist())  # type: ignore[arg-type]
    assert proposals[0] == proposals[1] == [[7, 7, 0, 0, 0]]
