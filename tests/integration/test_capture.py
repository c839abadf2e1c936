"""Rounds captured as CUDA graphs: the eager path's tokens, whatever changes between calls, and nothing left behind."""

import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracles import DeviceOracle
from pairs import FAMILIES, OPTIONS, make_pair, ragged_prompts, target_greedy
from torch import Tensor

from longspec import generate
from longspec.errors import UserError
from longspec.inference import engine_pool, methods
from longspec.inference.engine import capture as capture_module
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import GLIDE_METHODS, METHODS, Drafting, make_drafter
from longspec.inference.sampling import GREEDY
from longspec.models.glide import GlideMixin

pytestmark = pytest.mark.gpu
VOCAB = 61
SHAPE = (2, 4, 3, 2)


def prompts(*lengths: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    ids, mask, rows = ragged_prompts(*lengths)
    return ids.cuda(), mask.cuda(), rows


def tokens(model: GlideMixin, *lengths: int, **settings: object) -> list[list[int]]:
    ids, mask, _ = prompts(*lengths)
    return [new.tolist() for new in generate(model, ids, mask, **settings).new_tokens]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_captured_rounds_give_the_eager_paths_and_the_targets_tokens(tmp_path: Path, family: str, method: str) -> None:
    model = make_pair(tmp_path, family).cuda()
    assert make_runner(model, "auto", compiled=True).capturable, "nothing would be captured"
    for lengths in ((1,), (40,), (700, 3, 90), (512, 511, 513, 2)):
        settings = {"method": method, "max_new_tokens": 30, "tree_shape": SHAPE}
        captured, eager = (tokens(model, *lengths, **settings, compile=compiled) for compiled in (True, False))
        expected = [target_greedy(model, row, 30) for row in prompts(*lengths)[2]]
        assert captured == eager == expected


def test_every_accepted_length_in_a_captured_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle proposes the target's own tokens down to planned depths, different ones in each row."""
    model = make_pair(tmp_path).cuda()
    lengths, new = [1, 40, 506], 60
    ids, mask, rows = prompts(*lengths)
    truth = torch.tensor([target_greedy(model, row, new + 8) for row in rows]).cuda()
    plan = [[0, 4, 2], [4, 0, 1], [1, 3, 4], [3, 1, 0], [2, 2, 3], [4, 4, 4], [0, 0, 0]]

    def make_oracle(*args: object) -> DeviceOracle:
        return DeviceOracle(make_drafter(*args), SHAPE, lengths, truth, plan, VOCAB)

    monkeypatch.setattr(methods, "make_drafter", make_oracle)
    out = generate(model, ids, mask, tree_shape=SHAPE, max_new_tokens=new)
    assert [row.tolist() for row in out.new_tokens] == truth[:, :new].tolist()
    assert out.stats.mean_acceptance_length > 2.5
    by_depth = out.stats.accepted_by_depth
    assert by_depth == sorted(by_depth, reverse=True) and by_depth[-1] > 0 and out.stats.rounds > by_depth[0]
    assert len(set(by_depth)) == len(SHAPE), "some accepted length never occurred"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", GLIDE_METHODS)
@torch.no_grad()
def test_captured_rounds_of_an_extended_draft_draft_what_the_eager_ones_do(
    tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    """Round by round, what is drafted and the state that it comes from; a row sits every other round out."""
    model = make_pair(tmp_path, dtype=dtype, options=OPTIONS["both"], hidden_size=128).cuda()
    ids, _, _ = prompts(90, 7)
    engines = []
    for _ in range(2):
        runner, sampler = make_runner(model, "auto", compiled=True), GREEDY
        assert runner.capturable
        drafter = make_drafter(Drafting(method, SHAPE), runner, 2, sampler)
        engines.append(StaticBatch(runner, drafter, sampler, ids, [90, 7], max_new_tokens=60))
    captured, eager = engines
    capture_module.warm_up(captured)
    assert torch.equal(captured.prefill(), eager.prefill())
    play_round = capture_module.CapturedRound(captured)
    for number in range(6):
        before = eager.cache.newest_hidden.clone()
        active = torch.tensor([True, number % 2 == 0]).cuda()
        (tokens, counts, *_), (eager_tokens, eager_counts, *_) = play_round(active), eager.round(active)
        assert torch.equal(counts, eager_counts)
        assert all(torch.equal(tokens[b, :n], eager_tokens[b, :n]) for b, n in enumerate(counts.tolist()))
        torch.testing.assert_close(captured.cache.newest_hidden, eager.cache.newest_hidden)
        kept = (eager.cache.newest_hidden == before).all(-1).flatten().tolist()
        assert kept == [False, number % 2 == 1]
    drafts = [engine.drafter.propose(engine.root, engine.cache).tokens for engine in engines]
    assert torch.equal(*drafts)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """With the pool's engines their caches and graphs are gone, with the model its weights and its engines."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = make_pair(tmp_path, hidden_size=512, intermediate_size=1024).cuda()
    tokens(model, 50, max_new_tokens=4)  # libraries keep workspaces
    assert engine_pool.release(model) == 1
    loaded = torch.cuda.memory_allocated()
    for _ in range(2):
        tokens(model, 2000, max_new_tokens=40)
    assert engine_pool.release(model) == 1
    gc.collect()
    assert torch.cuda.memory_allocated() == loaded
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 40 << 20, "more than a library's workspace"


def test_graphs_that_share_memory_take_turns(tmp_path: Path) -> None:
    """Whoever listens to one `generate` may run another between its rounds."""
    model = make_pair(tmp_path).cuda()
    settings = {"max_new_tokens": 20, "tree_shape": SHAPE}
    heard: list[list[list[int]]] = []
    listener = SimpleNamespace(put=lambda value: heard.append(tokens(model, 300, 12, **settings)), end=lambda: None)
    alone = tokens(model, 30, **settings)
    assert tokens(model, 30, **settings, streamer=listener) == alone
    assert len(heard) > 2 and all(one == heard[0] == tokens(model, 300, 12, **settings) for one in heard)


def test_a_round_makes_the_host_wait_for_nothing_but_its_result(tmp_path: Path) -> None:
    """The result comes by an asynchronous copy and an event, which torch does not count as synchronization."""
    model = make_pair(tmp_path).cuda()
    settings = {"tree_shape": SHAPE, "temperature": 0.0, "seed": 0}
    tokens(model, 30, max_new_tokens=8, **settings)

    def waits(new: int) -> tuple[int, int]:
        ids, mask, _ = prompts(30)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                out = generate(model, ids, mask, max_new_tokens=new, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(warning.message) for warning in seen), out.stats.rounds

    (few, few_rounds), (many, many_rounds) = waits(10), waits(40)
    assert many_rounds > few_rounds and many == few


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}])
@pytest.mark.parametrize("method", METHODS)
def test_faulty_logits_end_captured_rounds(tmp_path: Path, method: str, sampling: dict[str, float]) -> None:
    """NaN in the draft, then in the target; another generation of the same model is not affected."""
    model = make_pair(tmp_path).cuda()
    settings = {"method": method, "max_new_tokens": 12, "tree_shape": SHAPE, "seed": 0} | sampling
    expected = tokens(model, 30, 7, **settings)
    for weight, name in ((model.draft_model.mlp.down_proj.weight, "draft"), (model.lm_head.weight, "target")):
        kept = weight[3, 4].clone()
        weight.data[3, 4] = torch.nan
        if name == "target" or method in GLIDE_METHODS:
            with pytest.raises(UserError, match=rf"^row 0, position \d+: the {name}'s logits are NaN or infinite"):
                tokens(model, 30, 7, **settings)
        weight.data[3, 4] = kept
        assert tokens(model, 30, 7, **settings) == expected


MODES: dict[str, dict[str, Any]] = {method: {"method": method} for method in METHODS} | {
    "node budget": {"method": "tree", "tree_nodes": 16},
    "lookup branches": {"method": "tree", "tree_nodes": 32, "lookup_branches": True},
    "auto": {"method": "auto"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_modes_agree_with_vanilla_up_to_rounding(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """8k prompts, head_dim 128, GQA 4: a mode leaves vanilla's tokens only where two logits are near."""
    layout = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    layout |= {"vocab_size": 512, "initializer_range": 0.05, "max_position_embeddings": 16384}
    model = make_pair(tmp_path, family, dtype, **layout).cuda()
    ids = torch.randint(1, 512, (2, 8000), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3000] = 0
    outputs = {mode: generate(model, ids, mask, max_new_tokens=48, **MODES[mode]).new_tokens for mode in MODES}
    # A list of tokens changes the draft's head.
    model.draft_model.set_vocabulary(torch.arange(0, 512, 3))
    outputs["list"] = generate(model, ids, mask, method="tree", max_new_tokens=48).new_tokens
    for mode, rows in outputs.items():
        for row, (ours, vanilla) in enumerate(zip(rows, outputs["vanilla"], strict=True)):
            differ = (ours != vanilla).nonzero()
            if len(differ):
                at = int(differ[0])
                prompt = ids[row][mask[row].bool()]
                with torch.no_grad():
                    logits = model(torch.cat([prompt, vanilla[:at]])[None], logits_to_keep=1).logits[0, -1].float()
                top = logits.topk(2).values
                assert top[0] - top[1] < 0.05 * logits.abs().max(), f"{mode}, row {row}, token {at}: {top.tolist()}"
