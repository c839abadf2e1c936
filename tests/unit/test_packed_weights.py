"""Products with packed weights, against torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longspec.models.packed_weights import MOST_ROWS, PackedWeights, has_mkl, packed_weights

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
needs_mkl = pytest.mark.skipif(not has_mkl(), reason="needs a torch with MKL")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(limit: int = 1 << 20) -> PackedWeights:
    packs = PackedWeights()
    packs.start_call(limit)
    return packs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, random(70, seed=2)])
def test_one_copy_serves_every_number_of_tokens(dtype: torch.dtype, bias: Tensor | None) -> None:
    packs, weight = started(), random(70, 33).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    for batch, count in [(1, tokens) for tokens in range(1, MOST_ROWS + 3)] + [(2, 5)]:
        x = random(batch, count, 33, seed=1).to(dtype)
        torch.testing.assert_close(packs.linear(x, weight, bias), nn.functional.linear(x, weight, bias), **CLOSE)
    assert len(packs.packs) == (has_mkl() and dtype == torch.float32)


@needs_mkl
@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.add_(1e-4),
        lambda weight: weight.data.mul_(-1),
        lambda weight: weight.data[3, 4:5].add_(1),
    ],
)
@torch.no_grad()
def test_a_weight_that_changes_between_two_calls_is_packed_again(change: Callable[[Tensor], object]) -> None:
    packs, weight, x = started(), nn.Parameter(random(40, 30)), random(1, 4, 30, seed=1)
    packs.linear(x, weight)
    (old,) = packs.packs.values()
    packs.start_call(1 << 20)
    packs.linear(x, weight)
    assert next(iter(packs.packs.values())).weight is old.weight, "the weight has not changed"

    change(weight)
    packs.start_call(1 << 20)
    torch.testing.assert_close(packs.linear(x, weight), x @ weight.t(), **CLOSE)
    assert next(iter(packs.packs.values())).weight is not old.weight


@needs_mkl
def test_copies_stay_below_the_limit_and_go_with_their_weights() -> None:
    packs, x = started(limit=12_000), random(1, 4, 30, seed=1)
    weights = [random(40, 30, seed=seed) for seed in range(4)]
    for weight in weights:
        torch.testing.assert_close(packs.linear(x, weight), x @ weight.t(), **CLOSE)
    assert packs.bytes == 2 * weights[0].nbytes

    packs.start_call(limit=12_000)
    packs.linear(x, weights[0])
    packs.start_call(limit=12_000)
    assert packs.bytes == weights[0].nbytes, "the last call did not use the other one"

    packs.start_call(limit=1_000)
    torch.testing.assert_close(packs.linear(x, weights[0]), x @ weights[0].t(), **CLOSE)
    assert packs.bytes == 0


def test_each_model_has_its_own_copies() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert packed_weights(first) is packed_weights(first)
    assert packed_weights(first) is not packed_weights(second)
