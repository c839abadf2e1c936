"""The SGLang plugin drafts what our own engine drafts, and asks SGLang to verify the best of it."""

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import make_pair, tiny_config
from samplers import sampler
from sglang_kernels import Pool, paged_attention, parents_of

from longspec.errors import UserError
from longspec.inference.drafting.decoder import Level
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.shared.residual import TokenSlots
from longspec.kernels.torch.attention import SdpaAttention
from longspec.kernels.torch.backend import TorchBackend
from longspec.models.draft_layer import DraftOptions
from longspec.models.draft_saving import save_draft_folder
from longspec.models.glide import GlideMixin
from longspec.sglang import draft_model
from longspec.sglang.checks import DEFAULT_TREE, check_server, set_default_tree
from longspec.sglang.draft_model import DraftModel, RoundColumns, load_layer, recent_tokens
from longspec.sglang.drafter import Drafter, prefill_positions
from longspec.sglang.graphs import BatchGraphs
from longspec.sglang.large_batches import VERIFIED_TOKENS, VerifySizes
from longspec.sglang.prefix import PrefixAttention
from longspec.sglang.tree import GrowingTree, most_nodes
from longspec.sglang.window import WindowCache

TOPK, STEPS = 3, 3
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
    layer = load_layer(str(draft), pair.config, torch.device("cpu"), torch.float32)
    weights = (pair.model.embed_tokens.weight, pair.lm_head.weight)
    model = DraftModel(layer, pair.config, weights, capacity + STEPS, len(table))
    cache = WindowCache(pools[0][0], table, layer.window)
    drafter = Drafter(model, cache, PrefixAttention(Pool(*pools), table, paged_attention), TOPK)
    for request, prompt, length in zip(REQUESTS.tolist(), prompts, LENGTHS, strict=True):
        for start, stop in pairwise((0, 5, length)):  # a prefill in two chunks
            positions = prefill_positions([start], [stop - start])
            drafter.store(prompt[start:stop], positions, table[request, start:stop].long())
        model.note_prompt(request, prompt[:length].tolist())
    return drafter


@pytest.mark.parametrize(("family", "listed"), [("llama", None), ("qwen2", LISTED), ("qwen3", None)])
@torch.no_grad()
def test_each_level_has_the_logits_of_our_own_draft(
    tmp_path: Path, family: str, listed: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path / "target", family, options=OPTIONS)
    pair.draft_model.set_vocabulary(listed)
    draft = save_draft(pair, tmp_path / "draft")
    prompts = torch.randint(0, 61, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    runner, own = Runner(pair), sampler(0.0, 2)
    tree = TreeDrafter(runner, 2, (TOPK,) * STEPS, own.drafting(), "descend")
    engine = StaticBatch(runner, tree, own, prompts, LENGTHS, max_new_tokens=8)
    engine.prefill()
    drafter = served(pair, draft, engine, prompts)

    levels: list[tuple[Any, ...]] = []
    grow, columns = GrowingTree.grow, RoundColumns.logits
    logits: list[torch.Tensor] = []
    monkeypatch.setattr(RoundColumns, "logits", lambda *args: logits.append(columns(*args)) or logits[-1])

    def record(growing: GrowingTree, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        levels.append((growing.first, growing.visible))
        return grow(growing, values, tokens)

    monkeypatch.setattr(GrowingTree, "grow", record)
    read: list[torch.Tensor] = []
    level = drafter.model.level
    monkeypatch.setattr(drafter.model, "level", lambda *args: read.append(args[0]) or level(*args))
    lengths = engine.cache.lengths.long()
    drafter.propose(STEPS, 8, engine.root, REQUESTS, lengths, engine.cache.newest_hidden[:, 0])

    own_columns = drafter.model.columns(REQUESTS)
    feature = tree.draft.feature(engine.cache)
    nodes = tree.draft.cache.keys.shape[2] - OPTIONS.window
    assert len(levels) == STEPS
    for number, ((first, visible), tokens) in enumerate(zip(levels, read, strict=True)):
        padded = torch.nn.functional.pad(visible, (0, nodes - visible.shape[2]))
        expected = tree.draft.level(Level(tokens, None, number, first, padded), engine.cache, feature)
        actual = logits[number]
        if listed is not None:
            expected = torch.stack([tree.draft.whole(expected[:, n]) for n in range(expected.shape[1])], 1)
            ids = torch.cat([listed.expand(2, -1), own_columns.own.clamp(min=0)], 1)[:, None].expand_as(actual)
            actual = torch.full_like(expected, -torch.inf).scatter_reduce_(2, ids, actual, "amax")
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.slow  # Triton's interpreter takes seconds
def test_kernels_draft_what_our_own_draft_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspec.kernels.triton.attention import TritonAttention
    from longspec.kernels.triton.backend import TritonBackend
    from longspec.sglang.paged import PagedAttention

    gpu = describe_gpu(torch.device("cpu"))
    monkeypatch.setattr(draft_model, "device_backend", lambda *args: TritonBackend(TritonAttention(gpu)))
    monkeypatch.setattr(sys.modules[__name__], "paged_attention", PagedAttention(gpu, 64))
    test_each_level_has_the_logits_of_our_own_draft(tmp_path, "qwen2", LISTED, monkeypatch)


def test_trees_are_verified_in_place_of_sglangs_kernel() -> None:
    """Keys and values are stored first, and what the kernel does not compute goes to SGLang's."""
    pytest.importorskip("triton")
    import attention_reference

    from longspec.sglang.paged import PagedAttention, verify_with

    generator = torch.Generator().manual_seed(2)
    nodes, width = 3, 16
    q, pool_k, pool_v = (torch.randn(40, 2, width, generator=generator) for _ in range(3))
    q, k, v = q[: 2 * nodes].flatten(1), pool_k[34:, :1], pool_v[34:, :1]
    starts, mask_starts = torch.tensor([0, 20, 27]), torch.tensor([0, 69, 99])  # prefixes of 20 and 7 tokens
    mask = torch.rand(110, generator=generator) < 0.5
    mask[[20, 44, 68, 76, 87, 98]] = True  # each node sees itself
    slots = torch.randperm(34, generator=generator)
    pools = pool_k[:, :1], pool_v[:, :1]
    calls: list[Any] = []
    pool = SimpleNamespace(
        set_kv_buffer=lambda *arguments: calls.append(arguments),
        get_key_buffer=lambda layer: pools[0],
        get_value_buffer=lambda layer: pools[1],
    )
    metadata = SimpleNamespace(
        qo_indptr=None,
        kv_indptr=starts,
        kv_indices=slots,
        custom_mask=mask,
        mask_indptr=mask_starts,
        max_extend_len=nodes,
        swa_out_cache_loc=None,
        out_cache_loc_full_physical=None,
    )
    backend = SimpleNamespace(
        extend_attention_fwd=None,
        forward_extend=lambda *arguments, sinks: calls.append(arguments),
        forward_metadata=metadata,
        token_to_kv_pool=pool,
    )
    verify_with(backend, PagedAttention(describe_gpu(torch.device("cpu")), 64))
    sizes = {"tp_q_head_num": 2, "qk_head_dim": width, "scaling": width**-0.5, "layer_id": 0, "k_scale": None}
    features = {"is_cross_attention": False, "logit_cap": 0.0, "sliding_window_size": -1, "xai_temperature_len": -1}
    layer = SimpleNamespace(**sizes, **features)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: True), out_cache_loc=torch.arange(6))
    out = backend.forward_extend(q, k, v, layer, batch)
    assert calls == [(layer, batch.out_cache_loc, k, v)]

    expected = torch.empty(2, nodes, 2, width)
    tree, prefix = PagedTree(k, v, mask, mask_starts[:-1]), PagedPrefix(*pools, slots, starts[:-1], starts[1:])
    queries = q.view(2, nodes, 2, width).transpose(1, 2)
    attention_reference.paged_attention(queries, prefix, expected, width**-0.5, 1, None, tree)  # type: ignore[arg-type]
    torch.testing.assert_close(out.view_as(expected), expected, atol=1e-5, rtol=1e-5)

    layer.sliding_window_size = 8
    backend.forward_extend(q, k, v, layer, batch)
    assert calls[2:] == [(q, k, v, layer, batch, False)]


def test_tree_holds_the_best_paths_in_sglangs_layout() -> None:
    """Every verified node's parent is verified, its path is the one that was scored, and no other is better."""
    generator = torch.Generator().manual_seed(0)
    tree = GrowingTree(2, TOPK, 4, torch.device("cpu"))
    expanded = [[((), 0.0)] for _ in range(2)]  # path and score of each expanded node
    numbered: list[list[tuple[int, ...]]] = [[()], [()]]  # the paths of all expanded nodes, by their numbers
    candidates: list[dict[tuple[int, ...], float]] = [{}, {}]
    for level in range(4):
        shape = (2, 1 if level == 0 else TOPK, 50)
        values, tokens = torch.rand(shape, generator=generator).log().topk(TOPK)
        for row in range(2):
            for (path, score), step, children in zip(expanded[row], values[row], tokens[row], strict=True):
                for value, token in zip(step.tolist(), children.tolist(), strict=True):
                    candidates[row][(*path, token)] = score + value
        following = tree.grow(values, tokens)
        for row in range(2):
            here = {path: s for path, s in candidates[row].items() if len(path) == level + 1}
            best = sorted(here, key=here.__getitem__, reverse=True)[:TOPK]
            assert [path[-1] for path in best] == following[row].tolist()
            expanded[row] = [(path, here[path]) for path in best]
            numbered[row] += best
            if level < 3:
                for path, visible in zip(best, tree.visible[row], strict=True):
                    seen = {numbered[row][node] for node in visible.nonzero()[:, 0].tolist()}
                    assert seen == {path[:length] for length in range(level + 2)}
    result = tree.candidates(9)
    for row in range(2):
        parents = parents_of(result.parents[row], result.chosen[row], TOPK)
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(parents, result.tokens[row].tolist(), strict=True):
            paths.append((*paths[parent], token))
        best = sorted(candidates[row], key=candidates[row].__getitem__, reverse=True)[:8]
        assert sorted(paths[1:]) == sorted(best)


def test_a_certain_child_ranks_after_its_parent() -> None:
    """Otherwise a verified node could lack its parent, at probability 1 in fp32."""
    tree = GrowingTree(1, 2, 3, torch.device("cpu"))
    certain = torch.tensor([0.0, -50.0])
    for nodes in (1, 2, 2):
        tree.grow(certain.expand(1, nodes, 2), torch.arange(2).expand(1, nodes, 2))
    first = [float(scores[0, 0]) for scores in tree.scores]
    assert first == sorted(set(first), reverse=True)
    chosen = tree.candidates(4)
    assert parents_of(chosen.parents[0], chosen.chosen[0], 2) == [0, 1, 2]


def test_a_level_of_a_chain_does_not_overwrite_the_one_before() -> None:
    """With one child per node all levels have as many nodes."""
    model = SimpleNamespace(trees={}, backend=TorchBackend(SdpaAttention()))
    logits = torch.tensor([[[0.0, 2.0, 1.0]], [[5.0, 0.0, 0.0]]])
    scores, tokens = DraftModel.best(model, logits, 1)  # type: ignore[arg-type]
    torch.testing.assert_close(scores, logits.log_softmax(-1).amax(-1, keepdim=True))
    tree = GrowingTree(2, 1, 2, torch.device("cpu"))
    tree.grow(scores, tokens)
    tree.grow(*DraftModel.best(model, -logits, 1))  # type: ignore[arg-type]
    assert [level.tolist() for level in tree.tokens] == [[[1], [0]], [[0], [1]]]
    assert (tree.scores[1] < tree.scores[0]).all()


def test_only_the_accepted_path_is_stored() -> None:
    stored: dict[int, tuple[int, int]] = {}

    def store(tokens: torch.Tensor, slots: TokenSlots) -> None:
        rows = zip(slots.slots[0].tolist(), tokens[0].tolist(), slots.positions[0].tolist(), strict=True)
        stored.update({slot: (token, position) for slot, token, position in rows if slot >= 0})

    table = torch.arange(1, 41, dtype=torch.int32).view(2, 20)
    cache = WindowCache(torch.zeros(41, 1, 1), table, 4)
    model = SimpleNamespace(store_keys_values=store, in_table=lambda at: at, rope=None)
    path = torch.tensor([[7, 8, 9], [4, 5, 6]])
    drafter = Drafter(model, cache, None, 2)  # type: ignore[arg-type]
    drafter.store_accepted(path, torch.tensor([1, 0]), torch.tensor([10, 3]), torch.tensor([2, 1]))
    # Position p of request r is in slot 20 * r + p + 1.
    assert stored == {31: (7, 10), 32: (8, 11), 4: (4, 3)}


def test_prefill_continues_each_cached_prefix() -> None:
    assert prefill_positions([4, 0, 7], [2, 3, 1]).tolist() == [4, 5, 0, 1, 2, 7]


def test_prompt_tokens_outside_the_list_are_the_most_recent() -> None:
    assert recent_tokens([1, 2, 3, 2, 5], {3}) == [5, 2, 1]


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(4, 5, 32), (3, 2, 5), (1, 4, 5), (2, 1, 3)])
def test_kernels_grow_the_same_tree(topk: int, steps: int, nodes: int) -> None:
    pytest.importorskip("triton")
    from longspec.sglang.tree_kernels import KernelTree

    generator = torch.Generator().manual_seed(3)
    plain, fused = (kind(2, topk, steps, torch.device("cpu")) for kind in (GrowingTree, KernelTree))
    for level in range(steps):
        rows = 2 * (1 if level == 0 else topk)
        # As `DraftModel.best` gives them: part of wider rows.
        values = torch.rand(rows, topk + 1, generator=generator).log().sort(descending=True).values
        values, tokens = values[:, 1:].view(2, -1, topk), torch.randint(99, (2, rows // 2, topk), generator=generator)
        assert fused.grow(values, tokens).equal(plain.grow(values, tokens))
        if level < steps - 1:
            assert fused.visible.equal(plain.visible) and fused.first == plain.first
    for mine, expected in zip(fused.candidates(nodes), plain.candidates(nodes), strict=True):
        assert mine.equal(expected)


def test_larger_batches_verify_smaller_trees() -> None:
    sizes = VerifySizes(5, 32, 4)
    assert [sizes.of(batch) for batch in (1, 8, 9, 32, 64, 65)] == [(5, 32), (5, 32), (4, 16), (3, 8), (2, 4), (0, 1)]
    assert all(batch * sizes.of(batch)[1] <= VERIFIED_TOKENS for batch in range(1, 257))
    assert VerifySizes(5, 6, 1).of(64) == (0, 1)
    assert VerifySizes(8, 32, 2).of(16) == (5, 16)  # 4 levels of 2 children per node have 15 nodes


def test_a_batch_runs_at_the_next_captured_size() -> None:
    graphs = BatchGraphs(lambda **rows: (), {})
    graphs.sizes = [1, 2, 4]
    assert [graphs.padded(batch) for batch in (1, 3, 4, 5)] == [1, 4, 4, 5]


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
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache True"),
        ({"speculative_num_steps": None}, "give all three"),
        ({"speculative_num_draft_tokens": most_nodes(4, 5) + 1}, "allow 6 to 69 tokens"),
        ({"speculative_num_steps": 20}, "--speculative-num-steps: 20 levels, but the draft's window is 16"),
        ({"tp_size": 4}, "--tp-size 4: num_key_value_heads 2"),
        ({"family": "mistral"}, "a mistral target; GLIDE supports llama, qwen2, qwen3"),
        ({"family": "qwen2"}, "a draft for a target with model_type llama"),
    ],
)
def test_a_wrong_combination_is_refused_in_one_line(draft_folder: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refused:
        check_server(server_args(draft_folder, **changes), tiny_config(changes.get("family", "llama")))
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_fitting_draft_runs_with_the_default_tree(draft_folder: Path) -> None:
    args = server_args(draft_folder, **dict.fromkeys(DEFAULT_TREE))
    set_default_tree(args)
    check_server(args, tiny_config("llama"))
    assert args.speculative_num_draft_tokens == 32


def server_args(draft: Path, **changes: Any) -> SimpleNamespace:
    """The options of SGLang's `ServerArgs` (srt/server_args.py) that the plugin reads."""
    args: dict[str, Any] = {
        "model_path": "target",
        "speculative_draft_model_path": str(draft),
        "tp_size": 1,
        "device": "cuda",
        "kv_cache_dtype": "auto",
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(**(args | DEFAULT_TREE | changes))
