"""Operations over the vocabulary: the kernels against their references, and these against brute force."""

from itertools import cycle

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import layer_reference as reference

from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import Draws, Tree, new_tree
from longspec.kernels.shared.watch import Watch
from longspec.kernels.torch import trees, vocabulary
from longspec.kernels.triton import logit_statistics, row_argmax, tree_growth
from longspec.kernels.triton.backend import TritonBackend

pytestmark = pytest.mark.kernel

SIZES = [
    # batch, parents, width, vocabulary; a sub-chunk has 256 columns, a chunk 4096
    (1, 1, 4, 4),
    (2, 3, 7, 5),
    (3, 4, 5, 257),
    (1, 2, 16, 4096),
    (2, 5, 3, 4100),
    (1, 16, 16, 9001),
    (1, 3, 64, 1000),
]


def half_grown(batch: int, parents: int, width: int, sampled: bool) -> tuple[Tree, slice]:
    """A tree whose root has two children; below them are `parents` nodes, and there is room for `width` more."""
    tree = new_tree(batch, 3 + parents + width, sampled, torch.device("cpu"))
    generator = torch.Generator().manual_seed(width)
    tree.tokens.random_(0, 9, generator=generator)
    above = slice(3, 3 + parents)
    tree.parents[:, 1:3] = 0
    tree.parents[:, above] = torch.randint(1, 3, (batch, parents), generator=generator)
    tree.visible[:, 1:3, 0] = True
    tree.visible[:, above, 0] = True
    tree.visible[:, above].scatter_(2, tree.parents[:, above, None], True)
    tree.scores[:, above] = -3 * torch.rand(batch, parents, generator=generator)
    tree.arrivals[:, above] = torch.rand(batch, parents, generator=generator, dtype=torch.float64)
    return tree, above


def random_logits(batch: int, parents: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(batch, parents, vocab, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -torch.inf
    logits[..., 0] = 0
    return logits.to(dtype)


def check_level(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: float, sampled: bool, device: str
) -> Tree:
    """The kernel's level equals torch's; with equal noise and the same q, where levels are sampled."""
    noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(5))
    batch, parents, vocab = logits.shape
    got = Tree(*(x.clone().to(device) for x in tree))
    all_q = torch.full((batch, parents + 2, vocab), torch.nan, device=device)  # a row for other levels on each side
    q = torch.full(logits.shape, torch.nan)
    # One temperature per row, each lower than the one before; None for 1.
    own = None if temperature == 1.0 else temperature / torch.arange(1, batch + 1, dtype=torch.float64)
    draws = (Draws(noise.to(device), all_q[:, 1:-1]), Draws(noise, q)) if sampled else (None, None)
    on_device = None if own is None else own.to(device)
    tree_growth.grow_level(got, above, width, logits.to(device), on_device, draws[0])
    trees.grow_level(tree, above, width, logits, own, draws[1])
    check_same(got, tree)
    torch.testing.assert_close(all_q[:, 1:-1].cpu(), q, atol=0, rtol=2e-5, equal_nan=not sampled)
    assert all_q[:, 0].isnan().all() and all_q[:, -1].isnan().all(), "rows of other levels changed"
    return got


def check_same(got: Tree, expected: Tree) -> None:
    for name in ("tokens", "parents", "visible"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    torch.testing.assert_close(got.scores.cpu(), expected.scores, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.arrivals.cpu(), expected.arrivals, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    ("sizes", "temperature", "dtype"),
    [
        *zip(SIZES, cycle((1.0, 0.6)), cycle([torch.float32]), strict=False),
        *(((1, 3, 7, 150), 0.7, dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_a_level_equals_the_reference(
    sizes: tuple[int, ...], temperature: float, dtype: torch.dtype, sampled: bool, device: str
) -> None:
    """Tokens, parents, scores, visible nodes, arrivals and q, for any size of the level and of the vocabulary."""
    batch, parents, width, vocab = sizes
    logits = random_logits(batch, parents, vocab)
    if dtype != torch.float32:  # distinct logits, because the kernel has its own order of equal ones
        values = torch.linspace(-20, 20, vocab).to(dtype).unique()
        logits = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))].expand(1, parents, -1)
    check_level(*half_grown(batch, parents, width, sampled), width, logits, temperature, sampled, device)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_level_of_a_reduced_vocabulary_equals_the_reference(sampled: bool, device: str) -> None:
    """Columns have tokens of their own in each row, empty columns the id of another one; q is 0 elsewhere."""
    batch, parents, width, columns, vocab = 2, 3, 7, 300, 1000
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:columns] for _ in range(batch)])
    logits = random_logits(batch, parents, columns)
    logits[..., 290:] = -torch.inf
    ids[:, 290:] = ids[:, 3:4]
    noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)

    grown, qs, warm = [], [], torch.tensor([0.8, 0.5]).double()
    for grow, place in ((trees.grow_level, "cpu"), (tree_growth.grow_level, device)):
        tree, above = half_grown(batch, parents, width, sampled)
        grown.append(Tree(*(x.to(place) for x in tree)))
        qs.append(torch.full((batch, parents + 2, vocab), torch.nan, device=place))
        draws = Draws(noise.to(place), qs[-1][:, 1:-1]) if sampled else None
        grow(grown[-1], above, width, logits.to(place), warm.to(place), draws, ids=ids.to(place))
    check_same(grown[1], grown[0])

    # The same level of the whole vocabulary, where all other tokens are impossible.
    whole = torch.full((batch, parents, vocab), -torch.inf)
    whole.scatter_(2, ids[:, None, :290].expand(-1, parents, -1), logits[..., :290])
    whole_noise = torch.ones(whole.shape, dtype=torch.float64)
    whole_noise.scatter_(2, ids[:, None, :290].expand(-1, parents, -1), noise[..., :290])
    tree, above = half_grown(batch, parents, width, sampled)
    whole_q = torch.empty(whole.shape)
    trees.grow_level(tree, above, width, whole, warm, Draws(whole_noise, whole_q) if sampled else None)
    check_same(grown[0], tree)
    for q in qs if sampled else ():
        torch.testing.assert_close(q[:, 1:-1].cpu(), whole_q, atol=1e-9, rtol=1e-5)
        assert q[:, 0].isnan().all() and q[:, -1].isnan().all(), "rows of other levels changed"


@pytest.mark.parametrize("sampled", [False, True])
def test_padding_has_no_parent(sampled: bool, device: str) -> None:
    """A level of five nodes for three possible tokens below two parents, one of which is padding itself."""
    tree, above = half_grown(2, 2, 5, sampled)
    tree.scores[:, above.start] = -torch.inf
    tree.arrivals[:, above.start] = torch.inf
    logits = torch.full((2, 2, 600), -torch.inf)
    logits[..., [3, 300, 599]] = torch.tensor([0.0, -90.0, 1.0])
    got = check_level(tree, above, 5, logits, 1.0, sampled, device)
    level = slice(above.stop, above.stop + 5)
    assert (got.parents[:, level] == torch.tensor([4, 4, 4, -1, -1], device=device)).all()
    assert (got.visible[:, level][:, 3:].sum(-1) == 1).all(), "padding sees only itself"


def test_equal_logits_give_distinct_children(device: str) -> None:
    """Ties within a sub-chunk, between sub-chunks and between parents: the first tokens win, none twice."""
    logits = torch.zeros(1, 2, 700, device=device)
    runs = []
    for _ in range(2):
        tree, above = half_grown(1, 2, 16, sampled=False)
        tree = Tree(*(x.to(device) for x in tree))
        tree.scores.zero_()
        tree_growth.grow_level(tree, above, 16, logits, None)
        runs.append(list(zip(tree.parents[0, 5:].tolist(), tree.tokens[0, 5:].tolist(), strict=True)))
    assert runs[0] == runs[1] == [(3, token) for token in range(16)]


def test_sampling_does_not_lose_improbable_paths(device: str) -> None:
    """Paths of probability 1e-250 next to one token that is almost certain."""
    tree, above = half_grown(2, 3, 6, sampled=True)
    tree.scores[:, above] -= 500.0
    logits = random_logits(2, 3, 300)
    logits[..., 17] = 80.0
    assert check_level(tree, above, 6, logits, 1.0, True, device).arrivals[:, above.stop :].isfinite().all()


def tokens_of(backend: type[Backend], operation: str, logits: Tensor, temperature: Tensor, watch: Watch) -> Tensor:
    """Tokens by an operation that reads logits [B, 2, V] and records faulty rows."""
    if operation == "softmax":
        return backend.softmax(logits, temperature, watch).argmax(-1)
    if operation == "argmax":
        return backend.argmax(logits / temperature[:, None, None].float(), watch=watch)
    tree, above = half_grown(len(logits), 2, 1, operation == "sampled")
    tree = Tree(*(x.to(logits.device) for x in tree))
    noise = torch.ones(logits.shape, dtype=torch.float64, device=logits.device)
    draws = Draws(noise, torch.empty(logits.shape, device=logits.device)) if operation == "sampled" else None
    backend.grow_level(tree, above, 1, logits, temperature, draws, watch)
    return tree.tokens[:, above.stop :]


@pytest.mark.parametrize("operation", ["softmax", "argmax", "best", "sampled"])
@pytest.mark.parametrize("vocab", [1, 4100])
def test_faulty_logits_are_recorded_for_their_sequence(vocab: int, operation: str, device: str) -> None:
    """NaN, infinity, overflow by the temperature, and rows without a possible token, in kernels and in torch. The
    tokens stay within the vocabulary. Some logits of -inf are no fault."""
    for fault in (torch.nan, torch.inf, 3e38, -torch.inf, None):
        logits = random_logits(3, 2, vocab)
        if fault is not None:  # in the second of the last sequence's two rows
            logits[2, 1, slice(None) if fault == -torch.inf else vocab - 1] = fault
        for backend, own_logits in ((Backend, logits), (TritonBackend, logits.to(device))):
            watch = Watch(torch.zeros(3, dtype=torch.long, device=own_logits.device), 2)
            temperature = torch.full((3,), 1e-2, dtype=torch.float64, device=own_logits.device)
            tokens = tokens_of(backend, operation, own_logits, temperature, watch)
            assert watch.faults.tolist() == [0, 0, 0 if fault is None else 2], fault
            assert tokens.min() >= 0 and tokens.max() < vocab, fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 300, 8195])
def test_softmax_and_statistics_equal_their_references(vocab: int, dtype: torch.dtype, device: str) -> None:
    """Including chunks without a possible token, rows far from zero, and probabilities down to 1e-38."""
    logits = random_logits(2, 3, vocab, dtype).to(device)
    logits[0, 0, 4096:] = -torch.inf
    logits[0, 1, 1:] -= 80
    logits[0, 2] -= 40
    warm = torch.tensor([0.7, 1.3]).double().to(device)
    out = logit_statistics.softmax(logits, warm)
    torch.testing.assert_close(out, vocabulary.softmax(logits, warm), atol=1e-38, rtol=3e-5)
    out = logit_statistics.log_sum_exp(logits)
    torch.testing.assert_close(out, vocabulary.log_sum_exp(logits), atol=1e-5, rtol=1e-6)
    noise = torch.empty(logits.shape, dtype=torch.float64)
    noise = noise.exponential_(generator=torch.Generator().manual_seed(1)).to(device)
    for draws in (None, noise):
        got = logit_statistics.logit_statistics(logits, warm, draws)
        torch.testing.assert_close(got, reference.logit_statistics(logits, warm, draws), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 300, 12300])
def test_argmax_equals_its_reference(vocab: int, dtype: torch.dtype, device: str) -> None:
    """The first of equal values, rows with a single possible token, and the first arrival."""
    values = random_logits(2, 3, vocab, dtype).to(device)
    values[0, 0, :-1] = -torch.inf
    values[0, 1] = 0
    assert torch.equal(row_argmax.argmax(values), vocabulary.argmax(values))
    noise = torch.empty(values.shape, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(1))
    noise, rates = noise.to(device), values.float().softmax(-1)
    assert torch.equal(row_argmax.first_arrival(rates, noise), vocabulary.first_arrival(rates, noise))
