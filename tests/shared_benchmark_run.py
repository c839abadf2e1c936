"""A random pair of the benchmarks that two ranks share, compared with the whole pair. A run script for forked ranks."""

from argparse import Namespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import parts
from benchmarks.decoding import decoding_pair, filled_batch, random_vocabulary
from benchmarks.parts import glide_draft, parts_of_round, sums_ms
from longspec.inference.engine.rounds import Rounds
from longspec.inference.process_group import equal_ranks
from longspec.inference.runner import Runner
from longspec.models.fused import can_fuse
from longspec.models.glide import GlideMixin
from longspec.models.target_split import part_of

RANKS = 2
LENGTHS = [20, 13]
LISTED = 40
TOKENS = torch.arange(60).view(2, 30)
OPTIONS = Namespace(temperature=0.0, tree_shape=[2, 3], gamma=2, tree_nodes=5, lookup_branches=False)
State = dict[str, Tensor]


def listed_pair() -> GlideMixin:
    pair = decoding_pair("tiny", "cpu", torch.float64)
    pair.draft_model.set_vocabulary(random_vocabulary(LISTED, pair.config.vocab_size))
    return pair


def filled(pair: GlideMixin) -> Rounds:
    batch, mode = filled_batch(Runner(pair), LENGTHS, "tree", OPTIONS)
    return batch.state(mode, slice(0, len(LENGTHS)))


def stores(engine: Rounds) -> list[Tensor]:
    """The caches of target and draft, with the heads as first dimension."""
    draft = glide_draft(engine.drafter)
    assert draft is not None
    target = [store.movedim(2, 0) for store in (engine.cache.keys, engine.cache.values)]
    return target + [store.movedim(1, 0) for store in (draft.cache.keys, draft.cache.values)]


def played(engine: Rounds) -> tuple[Tensor, Tensor, Tensor]:
    logits = engine.verify(engine.drafter.propose(engine.root, engine.cache))
    result = engine.round(torch.ones(len(LENGTHS), dtype=torch.bool))
    assert not engine.cache.faults.any()
    return result.tokens, result.counts, logits


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def whole_state(like: State, states: list[State]) -> State:
    """The weights of the whole pair from those of the ranks."""
    whole = {name: torch.full_like(weight, torch.nan) for name, weight in like.items() if weight.is_floating_point()}
    for name, weight in whole.items():
        for rank, state in enumerate(states):
            weight[part_of(name, tuple(weight.shape), rank, RANKS)] = state[name]
    return whole


def run_parts(engine: Rounds) -> None:
    """Every part of a round runs on a rank's heads."""
    parts.captured_ms = lambda work: (work(), 1.0)[1]  # type: ignore[assignment]
    heads = engine.runner.config.num_attention_heads // RANKS
    attention = engine.runner.attention
    with mock.patch.object(attention, "prefix", wraps=attention.prefix) as prefix:
        assert len(parts_of_round(engine, 9.0)) == 7 and sums_ms(engine) == 1.0
    assert {call.args[0].shape[1] for call in prefix.call_args_list} == {heads}


@torch.no_grad()
def main() -> None:
    with equal_ranks(RANKS, "cpu"):
        rank = dist.get_rank()
        torch.manual_seed(rank)  # must not matter
        pair = listed_pair()
        torch.manual_seed(rank)
        assert can_fuse(pair)
        states = gathered({name: weight.clone() for name, weight in pair.state_dict().items()})
        engine = filled(pair)
        caches = gathered([store.clone() for store in stores(engine)])
        shared = (pair(TOKENS).logits, *played(engine))
        run_parts(engine)
    if rank == 0:
        whole = listed_pair()
        whole.load_state_dict(whole_state(whole.state_dict(), states), strict=False)
        engine = filled(whole)
        for store, halves in zip(stores(engine), zip(*caches, strict=True), strict=True):
            store.copy_(torch.cat(halves))
        torch.testing.assert_close(shared, (whole(TOKENS).logits, *played(engine)))
        print("the halves are the whole")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
