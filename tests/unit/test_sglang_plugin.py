"""The SGLang plugin drafts what our own engine drafts, and asks SGLang to verify the best of it."""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import prefilled
from pairs import make_pair, tiny_config
from penalty_reference import sampler
from sglang_kernels import Pool, paged_attention, parents_of

from longspec.errors import UserError
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.kernels.shared.residual import TokenSlots
from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_folder
from longspec.models.glide import GlideMixin
from longspec.sglang import draft_model, large_batches
from longspec.sglang.checks import DEFAULT_TREE, check_server, load_layer, set_default_tree, suits_greedy_round
from longspec.sglang.draft_model import DraftModel
from longspec.sglang.drafter import Drafter, candidates, prefill_positions
from longspec.sglang.large_batches import VERIFIED_TOKENS, VerifySizes, most_nodes

SHAPE, NODES = (3, 9, 9), 12
LENGTHS = [29, 11]
REQUESTS = torch.tensor([2, 1])
OPTIONS = DraftOptions(window=16, kv_layers=(1,), target_feature=True, mlp_size=48)
LISTED = torch.arange(0, 61, 2)


def save_draft(pair: GlideMixin, folder: Path) -> Path:
    save_draft_folder(pair.draft_model.state_dict(), pair.config, folder, OPTIONS)
    return folder


def served(pair: GlideMixin, draft: Path, engine: StaticBatch, prompts: torch.Tensor) -> Drafter:
    """The plugin's drafter on a paged copy of the engine's target cache, in slots without order."""
    layers, batch, _, capacity, _ = engine.cache.keys.shape
    order = torch.randperm(batch * capacity, generator=torch.Generator().manual_seed(5)).view(batch, capacity)
    table = torch.zeros(4, capacity, dtype=torch.int32)
    table[REQUESTS] = (order + 1).int()
    pools = []
    for contents in (engine.cache.keys, engine.cache.values):
        pool = contents.new_zeros(layers, batch * capacity + 1, *contents.shape[2::2])
        pool[:, table[REQUESTS].long()] = contents.transpose(2, 3)
        pools.append(pool)
    layer = load_layer(str(draft), pair.config)
    weights = (pair.model.embed_tokens.weight, pair.lm_head.weight)
    model = DraftModel(layer, pair.config, weights, capacity + len(SHAPE), len(table))
    drafter = Drafter(model, VerifySizes(len(SHAPE), NODES, SHAPE[0]), Pool(*pools), table, paged_attention)
    for request, prompt, length in zip(REQUESTS.tolist(), prompts, LENGTHS, strict=True):
        for start, stop in pairwise((0, 5, length)):  # a prefill in two chunks
            positions = prefill_positions([start], [stop - start])
            drafter.store(prompt[start:stop], positions, table[request, start:stop].long())
        model.note_prompt(request, prompt[:length].tolist())
    return drafter


def both_drafters(tmp_path: Path, family: str, listed: torch.Tensor | None) -> tuple[StaticBatch, TreeDrafter, Drafter]:
    """Our own engine with its drafter after a prefill, and the plugin's drafter."""
    pair = make_pair(tmp_path / "target", family, options=OPTIONS)
    pair.draft_model.set_vocabulary(listed)
    draft = save_draft(pair, tmp_path / "draft")
    prompts = torch.randint(0, 61, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    own = sampler(0.0, 2)
    tree = TreeDrafter(Runner(pair), 2, SHAPE, own.drafting(), "descend", nodes=NODES)
    engine = prefilled(pair, [row[:n] for row, n in zip(prompts, LENGTHS, strict=True)], tree, own)
    return engine, tree, served(pair, draft, engine, prompts)


@pytest.mark.parametrize(("family", "listed"), [("llama", None), ("qwen2", LISTED), ("qwen3", None)])
@torch.no_grad()
def test_the_tree_is_that_of_our_own_engine(tmp_path: Path, family: str, listed: torch.Tensor | None) -> None:
    """Token by token; and SGLang reads its links from the numbers of the candidates."""
    engine, tree, drafter = both_drafters(tmp_path, family, listed)
    expected = tree.propose(engine.root, engine.cache)
    hidden = engine.cache.newest_hidden[:, 0]
    for _ in range(2):  # the second round grows where the first did
        actual = drafter.propose(engine.root, REQUESTS, engine.cache.lengths.long(), hidden)
        assert actual.tokens.equal(expected.tokens) and actual.parents.equal(expected.parents)
    expanded, numbers = candidates(actual.parents, len(SHAPE))
    assert expanded.shape[1] == 1 + NODES * (len(SHAPE) - 1)
    for row, parents in enumerate(actual.parents.tolist()):
        assert parents_of(expanded[row], numbers[row], NODES) == parents[1:]


@torch.no_grad()
def test_in_larger_batches_the_best_nodes_of_a_level_alone_get_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes 13 to 21 are the third level, 4 to 12 their possible parents."""
    assert [VerifySizes(5, 32, 4).most_read(batch) for batch in (1, 4, 8, 32)] == [16, 16, 8, 4]
    engine, _, drafter = both_drafters(tmp_path, "llama", None)
    for tokens, parents in ((64, range(4, 13)), (1, range(4, 7))):
        monkeypatch.setattr(large_batches, "READ_TOKENS", tokens)
        drafter.growths.clear()
        drafter.propose(engine.root, REQUESTS, engine.cache.lengths.long(), engine.cache.newest_hidden[:, 0])
        used = set(drafter.growths[2][0].parents[:, 13:].flatten().tolist())
        assert used <= set(parents) and (len(used) > 3) == (len(parents) > 3)


@pytest.mark.slow  # Triton's interpreter takes seconds
def test_kernels_draft_what_our_own_draft_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspec.kernels.triton.attention import TritonAttention
    from longspec.kernels.triton.backend import TritonBackend

    monkeypatch.setattr(draft_model, "Backend", lambda attention: TritonBackend(TritonAttention()))
    monkeypatch.setattr(sys.modules[__name__], "paged_attention", partial(TritonAttention().paged, capacity=64))
    test_the_tree_is_that_of_our_own_engine(tmp_path, "qwen2", LISTED)


def test_only_the_accepted_path_is_stored() -> None:
    stored: dict[int, tuple[int, int]] = {}

    def store(tokens: torch.Tensor, slots: TokenSlots) -> None:
        rows = zip(slots.slots[0].tolist(), tokens[0].tolist(), slots.positions[0].tolist(), strict=True)
        stored.update({slot: (token, position) for slot, token, position in rows if slot >= 0})

    table = torch.arange(1, 41, dtype=torch.int32).view(2, 20)
    layer = SimpleNamespace(store_keys_values=store)
    parts: dict[str, Any] = {"stream": lambda tokens: tokens, "in_table": lambda at: at, "rope": None}
    model: Any = SimpleNamespace(layer=layer, layers=(0,), **parts)
    keys = torch.zeros(1, 41, 1, 1)
    drafter = Drafter(model, VerifySizes(2, 3, 1), Pool(keys, keys), table, paged_attention)
    rows = torch.tensor([7, 4]), torch.tensor([[8, 9], [5, 6]])
    drafter.store_accepted(*rows, torch.tensor([1, 0]), torch.tensor([10, 3]), torch.tensor([2, 1]))
    # Position p of request r is in slot 20 * r + p + 1.
    assert stored == {31: (7, 10), 32: (8, 11), 4: (4, 3)}


def test_prefill_continues_each_cached_prefix() -> None:
    assert prefill_positions([4, 0, 7], [2, 3, 1]).tolist() == [4, 5, 0, 1, 2, 7]


def test_larger_batches_verify_smaller_trees() -> None:
    sizes = VerifySizes(5, 32, 4)
    assert [sizes.of(batch) for batch in (1, 4, 5, 16, 32, 33)] == [(5, 32), (5, 32), (4, 16), (3, 8), (2, 4), (0, 1)]
    assert all(batch * sizes.of(batch)[1] <= VERIFIED_TOKENS for batch in range(1, VERIFIED_TOKENS + 1))
    assert VerifySizes(5, 6, 1).of(64) == (0, 1)
    assert VerifySizes(8, 32, 2).of(8) == (5, 16)  # 4 levels of 2 children per node have 15 nodes
    assert [sizes.shape(batch) for batch in (1, 16)] == [(4, 16, 16, 16, 16), (4, 6, 5)]


@pytest.mark.parametrize(
    "needs",
    [
        {"has_grammar": True},
        {"return_logprob": True},
        {"sampling_info.is_all_greedy": False},
        {"sampling_info.has_custom_logit_processor": True},
        {"sampling_info.logit_bias": torch.zeros(1)},
    ],
)
def test_what_a_graph_leaves_out_takes_sglangs_own_round(needs: dict[str, Any]) -> None:
    nothing = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
    sampling = SimpleNamespace(is_all_greedy=True, has_custom_logit_processor=False, **nothing)
    flags = dict.fromkeys(("has_grammar", "return_logprob", "return_hidden_states"), False)
    batch = SimpleNamespace(sampling_info=sampling, **flags)
    assert suits_greedy_round(batch)
    for name, value in needs.items():
        setattr(sampling if "." in name else batch, name.rpartition(".")[2], value)
    assert not suits_greedy_round(batch)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    return save_draft(make_pair(folder / "target", "llama", options=OPTIONS), folder / "draft")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path: missing"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({"speculative_num_draft_tokens": most_nodes(4, 5) + 1}, "allow 6 to 69 tokens"),
        ({"speculative_num_steps": 20}, "--speculative-num-steps: 20 levels, but the draft's window is 16"),
        ({"tp_size": 4}, "--tp-size 4: num_key_value_heads 2"),
        ({"family": "mistral"}, "a mistral target; GLIDE supports llama, qwen2, qwen3"),
        ({"family": "qwen2"}, "a draft for a target with model_type 'llama'"),
    ],
)
def test_a_wrong_combination_is_refused_in_one_line(draft_folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refused:
        check_server(server_args(draft_folder, **changes), tiny_config(changes.get("family", "llama")))
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_fitting_draft_runs_with_the_default_tree_and_an_incomplete_one_is_refused(draft_folder: Path) -> None:
    args = server_args(draft_folder, **dict.fromkeys(DEFAULT_TREE))
    set_default_tree(args)
    check_server(args, tiny_config("llama"))
    assert args.speculative_num_draft_tokens == 32
    for value in (None, 0):
        with pytest.raises(UserError, match="give all three"):
            set_default_tree(SimpleNamespace(**(DEFAULT_TREE | {"speculative_eagle_topk": value})))


def server_args(draft: Path, **changes: Any) -> SimpleNamespace:
    """The options of SGLang's `ServerArgs` (srt/server_args.py) that the plugin reads."""
    args: dict[str, Any] = {"model_path": "target", "speculative_draft_model_path": str(draft), "tp_size": 1}
    args |= {"device": "cuda", "kv_cache_dtype": "auto", "disaggregation_mode": "null"}
    return SimpleNamespace(**(args | DEFAULT_TREE | changes))
