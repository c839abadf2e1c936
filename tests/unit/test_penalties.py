"""Random numbers, settings and penalties per row: each node of a tree has the law of its own whole text."""

from math import inf
from typing import Any

import pytest
import torch
from faults import PENALTY_FAULTS
from penalty_reference import processed, transformers_warpers

from longspec.inference import sampling
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.request import PenaltyKind, Sampling, joined_penalties
from longspec.inference.row_settings import RowSettings, served_penalties
from longspec.inference.sampling import Sampler, SamplingKind, sampling_kind
from longspec.inference.token_options import token_settings
from longspec.kernels.torch.row_noise import row_noise

VOCAB, EOS = 7, 6
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.8, "frequency_penalty": -0.6},
    {"frequency_penalty": 1.3, "logit_bias": {2: 3.0, "4": -1.5}},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 3, "min_new_tokens": 6},
    {"bad_words_ids": [[1], [2, 3], [0, 0], [4, 1, 2], [1, 2, 3, 4], [EOS]], "suppress_tokens": [5]},
    {"repetition_penalty": 1.2, "presence_penalty": 1.0, "no_repeat_ngram_size": 4, "min_new_tokens": 5},
    {"sequence_bias": {(3,): -1.5, (2, 5): 4.0, (0, 1, 3): -inf}, "begin_suppress_tokens": [0, 4], "min_length": 9},
    {},
]


def sampling_of(options: dict[str, Any], prompt_length: int = 0) -> Sampling:
    return Sampling(**token_settings(options, [EOS], VOCAB, prompt_length))


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> Proposal:
    """Any parents and tokens; siblings may be equal."""
    tokens = torch.randint(VOCAB, (rows, nodes), generator=generator)
    parents = torch.stack([torch.randint(node or 1, (rows,), generator=generator) for node in range(nodes)], 1)
    parents[:, 0] = -1
    visible = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
    levels = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        for node in range(1, nodes):
            parent = parents[row, node]
            visible[row, node] |= visible[row, parent]
            levels[row, node] = levels[row, parent] + 1
    return Proposal(tokens, parents, levels, visible, int(levels.max()))


def check_tree(samplings: list[dict[str, Any]], seed: int, kind: PenaltyKind | None) -> None:
    """Rows of unequal texts with these options, each node compared with the reference on its own text."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(samplings)
    lengths = torch.randint(1, 9, (rows,), generator=generator)
    history = torch.randint(VOCAB, (rows, 24), generator=generator)
    settings = RowSettings.allocate(rows, torch.device("cpu"), kind, 24)
    sampler = Sampler(SamplingKind(penalties=kind), settings)
    own = [sampling_of(options, int(length)) for options, length in zip(samplings, lengths, strict=True)]
    settings.assign(slice(0, rows), own, [0] * rows)
    # A prompt, the first token, and the tokens of a round, of which each row keeps some.
    prompt_logits = torch.randn(rows, VOCAB, generator=generator)
    settings.positions.copy_(lengths)
    first = sampler.first_tokens(prompt_logits, history[:, :9], lengths.tolist())
    texts = []
    for row, options in enumerate(samplings):
        prompt = history[row, : lengths[row]].tolist()
        expected = processed(torch.tensor([prompt]), prompt_logits[row, None], len(prompt), options, [EOS])
        assert first[row] == expected.argmax()
        texts.append([*prompt, int(first[row])])
    tokens, counts = history[:, 12:16], torch.randint(0, 5, (rows,), generator=generator)
    sampler.append(tokens, counts)
    settings.positions += counts.int()
    for row, text in enumerate(texts):
        text += tokens[row, : counts[row]].tolist()

    tree = random_tree(rows, 9, generator)
    logits = torch.randn(rows, 9, VOCAB, generator=generator)
    found = sampler.penalized(logits, tree)
    for row, options in enumerate(samplings):
        for node in range(9):
            ids = torch.tensor([texts[row] + tree.tokens[row, 1:][tree.visible[row, node, 1:]].tolist()])
            expected = processed(ids, logits[row, node, None], int(lengths[row]), options, [EOS])
            torch.testing.assert_close(found[row, node], expected[0], rtol=1e-6, atol=1e-6)
            if not options:
                assert torch.equal(found[row, node], logits[row, node])  # to the bit


@pytest.mark.parametrize("seed", range(3))
def test_each_node_sees_its_rows_text_and_its_own_ancestors(seed: int) -> None:
    """Random trees of rows with unlike options, and of one in all; with the needed operations, or a server's."""
    samplings = [sampling_of(options) for options in OPTIONS]
    for kind in (joined_penalties(samplings), served_penalties(samplings)):
        check_tree(OPTIONS, seed, kind)
    for options in OPTIONS[:-1]:
        check_tree([options] * 3, seed, sampling_of(options).penalties)


@pytest.mark.parametrize("name", PENALTY_FAULTS)
def test_planted_faults_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PENALTY_FAULTS[name].plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_tree(OPTIONS, 0, joined_penalties([sampling_of(options) for options in OPTIONS]))


def test_the_draft_sees_its_rows_text() -> None:
    """Its logits are the target's at the root, but for n-grams and words; of a vocabulary list, the listed ones."""
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {1: 2.0}, "suppress_tokens": [3]}
    kind = sampling_of(options).penalties
    settings = RowSettings.allocate(2, torch.device("cpu"), kind, 8)
    sampler = Sampler(SamplingKind(penalties=kind), settings)
    settings.assign(slice(0, 2), [sampling_of(options), Sampling()], [0, 0])
    text = torch.tensor([[1, 2, 2, 5, 4], [1, 2, 2, 5, 4]])
    settings.positions.copy_(torch.tensor([2, 2]))
    sampler.first_tokens(torch.zeros(2, VOCAB), text[:, :2], [2, 2])
    settings.positions -= 1
    sampler.append(text[:, 2:], torch.tensor([3, 3]))
    settings.positions += 3
    logits = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    terms = sampler.draft_terms(VOCAB)
    assert terms is not None
    found = terms.applied(logits)
    expected = processed(text[:1].expand(3, -1), logits[0], 2, options)
    torch.testing.assert_close(found[0].clamp(min=-1000), expected.clamp(min=-1000))
    assert torch.equal(found[1], logits[1])
    ids = torch.tensor([[4, 3, 1], [0, 1, 2]])
    listed = sampler.draft_terms(VOCAB, ids)
    assert listed is not None
    columns = ids[:, None].expand(-1, 3, -1)
    assert torch.equal(listed.applied(logits.gather(2, columns)), found.gather(2, columns))


def test_rows_without_penalties_run_none_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neutral values are no penalties, whatever the option."""
    neutral = {"repetition_penalty": 1, "logit_bias": {3: 0}, "bad_words_ids": [], "min_new_tokens": 0}
    assert sampling_of(neutral) == Sampling() and joined_penalties([Sampling(), Sampling(1.0)]) is None
    sampler = Sampler(SamplingKind("sampled"), RowSettings.allocate(1, torch.device("cpu")))
    logits = torch.zeros(1, 9, VOCAB)
    for name in ("penalize", "RowTerms", "Nodes"):
        monkeypatch.setattr(sampling, name, None)
    tree = random_tree(1, 9, torch.Generator().manual_seed(0))
    assert sampler.penalized(logits, tree) is logits and sampler.draft_terms(VOCAB) is None


SEEDS = torch.tensor([0, 5, -1, 2**62])
POSITIONS = torch.tensor([0, 3, 7, 100], dtype=torch.int32)
CONSTANT = torch.tensor([False, True, False, False])


@pytest.mark.kernel
@pytest.mark.parametrize("stream", [0, 1, 5 << 20])
def test_the_kernel_has_the_bits_of_the_reference(device: str, stream: int) -> None:
    kernel = pytest.importorskip("longspec.kernels.triton.row_noise").row_noise
    seeds, positions, constant = (x.to(device) for x in (SEEDS, POSITIONS, CONSTANT))
    uniforms = kernel(seeds, positions, stream, (3, 421))
    assert torch.equal(uniforms.cpu(), row_noise(SEEDS, POSITIONS, stream, (3, 421)))
    exponentials = kernel(seeds, positions, stream, (3, 421), constant)
    expected = row_noise(SEEDS, POSITIONS, stream, (3, 421), CONSTANT)
    torch.testing.assert_close(exponentials.cpu(), expected, rtol=1e-14, atol=0)
    narrow = kernel(seeds, positions, stream, (2, 400), None, 421, 421)  # of fewer columns, from the second row on
    assert torch.equal(narrow, uniforms[:, 1:, :400])


def test_law_of_the_numbers() -> None:
    seeds, positions = torch.arange(40) // 8, torch.arange(40) % 8
    uniforms = row_noise(seeds, positions, 0, (2500,))
    exponentials = row_noise(seeds, positions, 1, (2500,), torch.zeros(40, dtype=torch.bool))
    assert exponentials.min() > 0 and exponentials.isfinite().all()
    both = torch.cat([uniforms, 1 - (-exponentials).exp()])
    ordered = both.flatten().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (ordered - steps).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov-Smirnov at a level of 1e-3
    correlations = torch.corrcoef(both).triu(1).abs()  # seeds, positions and streams are unrelated
    assert correlations.max() < 5.2 / 2500**0.5  # 3,160 pairs at a level of 1e-3


WIDE = 13
ROWS = [
    Sampling(),
    Sampling(0.7),
    Sampling(1.0, top_k=3),
    Sampling(1.5, top_p=0.6),
    Sampling(0.9, top_p=0.8, top_k=5),
    Sampling(0.0, top_p=0.5, top_k=2),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, top_k=WIDE + 5),
    Sampling(1.2, min_p=0.2),
    Sampling(1.0, typical_p=0.7),
    Sampling(0.8, epsilon_cutoff=0.05),
    Sampling(1.3, top_k=9, top_p=0.9, min_p=0.05, typical_p=0.9, epsilon_cutoff=0.02),
]


def settings() -> RowSettings:
    rows = RowSettings.allocate(len(ROWS), torch.device("cpu"))
    rows.assign(slice(0, len(ROWS)), ROWS, [2**64 - 1 - row for row in range(len(ROWS))])
    rows.positions.copy_(torch.arange(len(ROWS)))
    return rows


def transformers_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [N, V]."""
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), WIDE).float()
    warpers = transformers_warpers(sampling.temperature, {name: getattr(sampling, name) for name in sampling.filters})
    return warpers(None, logits).softmax(-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [(), (4,)])
def test_each_row_has_its_own_distribution(nodes: tuple[int, ...]) -> None:
    """In a batch with all kinds of rows, and alone."""
    logits = 3 * torch.randn(len(ROWS), *nodes, WIDE, generator=torch.Generator().manual_seed(0))
    logits[4, ..., 3] = -torch.inf
    p = Sampler(sampling_kind(ROWS), settings()).probabilities(logits)
    for row, own in enumerate(ROWS):
        expected = transformers_probabilities(logits[row].view(-1, WIDE), own).view(logits[row].shape)
        torch.testing.assert_close(p[row], expected)
        assert torch.equal(p[row] == 0, expected == 0)
        if not own.greedy:
            alone = Sampler(sampling_kind([own]), settings().narrow(slice(row, row + 1)))
            torch.testing.assert_close(alone.probabilities(logits[row, None])[0], expected)
