"""The engine's state after rounds of every accepted length: an oracle proposes the target's own tokens with misses."""

from pathlib import Path

import pytest
import torch
from oracles import Oracle
from pairs import OPTIONS, make_pair, target_greedy
from torch import Tensor

from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.models.draft_layer import WINDOW
from longspec.models.glide import GlideMixin

SHAPE = (2, 4, 3, 2)
DEPTH = len(SHAPE)
VOCAB = 61
# Accepted lengths by round and row: 0 … DEPTH all occur, in changing order, with a different one in each row.
PLAN = [[0, 4, 2], [4, 0, 1], [1, 3, 4], [3, 1, 0], [2, 2, 3], [4, 4, 4], [0, 0, 0]]


def oracle_tree(model: GlideMixin, truth: list[list[int]], lengths: list[int], plan: list[list[int]]) -> Oracle:
    """Puts the true continuation, down to a planned depth, on a random path of the real draft's tree."""
    return Oracle(TreeDrafter(Runner(model), len(truth), SHAPE, GREEDY, "descend"), lengths, truth, plan, VOCAB)


def full_forward_kv(model: GlideMixin, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The target's keys and values [L, Hkv, T, D] of tokens [T], from transformers' own forward and cache."""
    layers = model(tokens[None], use_cache=True).past_key_values.layers
    return torch.stack([layer.keys[0] for layer in layers]), torch.stack([layer.values[0] for layer in layers])


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_state_after_every_accepted_length(tmp_path: Path, family: str, device: str) -> None:
    """After each round: compacted target cache, newest hidden state, draft window, length and root equal those of a
    fresh start there."""
    model = make_pair(tmp_path, family, options=OPTIONS["both"]).to(device)
    lengths = [1, 40, WINDOW - 6]  # the last row's window wraps around on the way
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).to(device) for n in lengths]
    truth = [target_greedy(model, prompt, 1 + (DEPTH + 1) * (len(PLAN) + 1)) for prompt in prompts]
    oracle = oracle_tree(model, truth, lengths, PLAN)
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    engine = StaticBatch(Runner(model), oracle, GREEDY, padded, lengths, max_new_tokens=60)
    assert engine.prefill().tolist() == [row[0] for row in truth]
    at = [0, 0, 0]
    for planned in PLAN:
        tokens, counts, *_ = engine.round(torch.ones(3, dtype=torch.bool, device=device))
        assert counts.tolist() == [n + 1 for n in planned]
        for b, count in enumerate(counts.tolist()):
            assert tokens[b, :count].tolist() == truth[b][at[b] + 1 : at[b] + 1 + count]
            at[b] += count
            assert engine.root[b] == truth[b][at[b]]
            assert engine.cache.lengths[b] == lengths[b] + at[b]
            check_row(model, engine, oracle, b, torch.cat([prompts[b], torch.tensor(truth[b][: at[b]], device=device)]))


def check_row(model: GlideMixin, engine: StaticBatch, oracle: Oracle, b: int, read: Tensor) -> None:
    """`read`: the tokens before the root. Target cache against a full forward, window against fresh projections."""
    length = len(read)
    newest = model.model(read[None]).last_hidden_state[0, -1]
    torch.testing.assert_close(engine.cache.newest_hidden[b, 0], newest, rtol=1e-4, atol=1e-4)
    for store, expected in zip((engine.cache.keys, engine.cache.values), full_forward_kv(model, read), strict=True):
        torch.testing.assert_close(store[:, b, :, :length], expected, rtol=1e-4, atol=1e-4)
    positions = torch.arange(max(0, length - WINDOW), length, device=read.device)
    embeddings, rope = model.embed(read[None, positions], positions[None])
    ring = oracle.drafter.draft.cache
    for store, expected in zip((ring.keys, ring.values), model.draft_model.keys_values(embeddings, rope), strict=True):
        torch.testing.assert_close(store[b][:, positions % WINDOW], expected[0], rtol=1e-5, atol=1e-5)


def test_draft_cache_does_not_grow_with_the_prompt(tmp_path: Path) -> None:
    model = make_pair(tmp_path)
    short, long = (TreeDrafter(Runner(model), 1, SHAPE, GREEDY, "descend") for _ in range(2))
    short.start(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]))
    long.start(torch.zeros(1, 3000, dtype=torch.long), torch.tensor([3000]))
    assert short.draft.cache.keys.shape == long.draft.cache.keys.shape == (1, 2, WINDOW + 1 + sum(SHAPE), 8)
