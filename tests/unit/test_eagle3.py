"""EAGLE-3 drafts: the published files, the arithmetic of other engines, training as in decoding, lossless decoding."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_reference import CONFIG, LISTED, VOCAB, Reference, published_pair, published_weights, random_tokens
from oracles import Oracle, compare_trees, prefilled, training_logits, training_pass
from pairs import GLIDE, save_target, target_greedy
from safetensors.torch import load_file, save_file
from serving import ids

from longspec import generate
from longspec.errors import UserError
from longspec.inference.drafting.chain import ChainDrafter
from longspec.inference.drafting.decoders import new_decoder
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Request
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import make_runner
from longspec.inference.memory import ROUND_BYTES
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.backend import TritonBackend
from longspec.models.draft_files import draft_settings
from longspec.models.draft_saving import save_draft_file, save_draft_folder
from longspec.models.eagle3 import Eagle3Draft
from longspec.models.eagle3_options import Eagle3Options
from longspec.models.target_files import read_config

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.mark.parametrize(
    "switches", [{}, {"norm_before_residual": True, "norm_output": True}], ids=["plain", "switched"]
)
@torch.no_grad()
def test_the_layer_computes_what_vllm_computes(tmp_path: Path, switches: dict[str, bool]) -> None:
    """On the same weights, for prompts of several lengths in one batch and four steps."""
    model, weights = published_pair(tmp_path, **switches), published_weights()
    prompts, nodes = [random_tokens(3, 24)[row, :n] for row, n in enumerate((1, 2, 19))], random_tokens(3, 4)
    draft = new_decoder(Runner(model), 3, nodes=4)
    engine = prefilled(model, prompts, ChainDrafter(draft, 4, GREEDY))
    actual = [draft.next_logits(nodes[:, step], step, engine.cache, None) for step in range(4)]
    for row, prompt in enumerate(prompts):
        inputs = model.model(prompt[None], output_hidden_states=True).hidden_states
        aux = torch.cat([inputs[layer] for layer in (2, 1, 0)], -1)[0]  # 2, L / 2 and L - 3 of three layers
        reference = Reference(weights, model.model.embed_tokens.weight, switches)
        for step, expected in enumerate(reference.chain(prompt, aux, nodes[row])):
            torch.testing.assert_close(actual[step][row], expected, **TOLERANCE)


@pytest.mark.kernel
@pytest.mark.parametrize("window", [None, 8])
@torch.no_grad()
def test_tree_logits_equal_training_logits_along_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, window: int | None
) -> None:
    """Every node, whatever its siblings: step s of training is level s of trees. They end around the window's edge."""
    model = published_pair(tmp_path, "qwen2", window)
    prompts = [row[:n] for row, n in zip(random_tokens(4, 40), (1, 5, 9, 33), strict=True)]
    compare_trees(model, prompts, TOLERANCE)
    monkeypatch.setattr("longspec.inference.runner.choose_backend", lambda *_: TritonBackend(TritonAttention()))
    prompts = [prompt.to(device) for prompt in prompts]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 2e-2)):
        for rows in (prompts[:1], prompts[1:3]):  # kernels for one token, and for several
            compare_trees(model.to(device, dtype), rows, {"rtol": tolerance, "atol": tolerance})


@torch.no_grad()
def test_packed_segments_do_not_see_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments in a row of several chunks, at two lags, give the logits of each segment alone."""
    monkeypatch.setattr("longspec.kernels.training.varlen_torch.CHUNK", 7)
    model = published_pair(tmp_path, window=12)
    first, second = random_tokens(9), random_tokens(23)
    logits = lambda hidden, *_: model.draft_model.lm_head(hidden)[0]  # noqa: E731
    packed = training_pass(model, [first, second], torch.tensor([2, 4]), logits)
    # Before the lag's first chain there is nothing to compare: such a query has no root.
    torch.testing.assert_close(packed[2:9], training_logits(model, first, 2)[2:], **TOLERANCE)
    torch.testing.assert_close(packed[13:], training_logits(model, second, 4)[4:], **TOLERANCE)


def test_gradients_do_not_depend_on_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all steps at once, as in training; with several chunks the attention is computed again in backward."""
    model = published_pair(tmp_path)
    tokens = random_tokens(2, 20)
    gradients = []
    for chunk in (64, 7):
        monkeypatch.setattr("longspec.kernels.training.varlen_torch.CHUNK", chunk)
        lags = torch.arange(1, 5)[:, None].expand(-1, 2)
        loss = lambda hidden, *_: model.draft_model.lm_head(hidden).logsumexp(-1).sum()  # noqa: E731
        losses = training_pass(model, tokens, lags, loss, rows=2)
        assert len(losses) == 4
        weights = [weight for weight in model.draft_model.parameters() if weight.requires_grad]
        gradients.append(torch.autograd.grad(sum(losses), weights))
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("qwen2", 8)])
def test_a_published_draft_decodes_losslessly(tmp_path: Path, family: str, window: int | None) -> None:
    """Trees, chains and auto give the target's own greedy tokens in a ragged batch; sampled rows are as alone."""
    model = published_pair(tmp_path, family, window)
    prompts = [random_tokens(2, 21)[0, :3].tolist(), random_tokens(2, 21)[1].tolist()]
    expected = [target_greedy(model, torch.tensor(prompt), 24) for prompt in prompts]
    for settings in ({"method": "tree"}, {"method": "seq"}, {"method": "auto"}, {"method": "tree", "compile": False}):
        output = generate(model, prompts, max_new_tokens=24, **settings)  # type: ignore[arg-type]
        assert [row.tolist() for row in output.new_tokens] == expected, settings
    together = generate(model, prompts, method="tree", max_new_tokens=12, temperature=1.0, seed=[3, 4])
    alone = generate(model, prompts[1:], method="tree", max_new_tokens=12, temperature=1.0, seed=4)
    assert torch.equal(together.new_tokens[1], alone.new_tokens[0])


@pytest.mark.parametrize("window", [None, 16])
@torch.no_grad()
def test_accepted_tokens_are_read_as_a_prompts_are(tmp_path: Path, window: int | None) -> None:
    """After rounds that accept 2, 0, 3 and 1 tokens, the draft's cache is that of the whole text as a prompt."""
    model = published_pair(tmp_path, window=window)
    prompts = [random_tokens(2, 19)[0, :6], random_tokens(2, 19)[1]]
    truth = [target_greedy(model, prompt, 24) for prompt in prompts]
    drafter = TreeDrafter(Runner(model), 2, (2, 2, 2), GREEDY, "descend")
    oracle: Any = Oracle(drafter, [6, 19], truth, ((2, 3), (0, 1), (3, 0), (1, 2)), VOCAB)
    engine = prefilled(model, prompts, oracle)
    for _ in range(4):
        engine.round(torch.ones(2, dtype=torch.bool))
    lengths = engine.cache.lengths.tolist()
    assert oracle.accepted == [[2, 0, 3, 1], [3, 1, 0, 2]] and lengths == [16, 29]
    texts = [torch.cat([p, torch.tensor(t)])[:n] for p, t, n in zip(prompts, truth, lengths, strict=True)]
    fresh = TreeDrafter(Runner(model), 2, (2, 2, 2), GREEDY, "descend")
    prefilled(model, texts, fresh)
    for name in ("keys", "values"):
        for row, length in enumerate(lengths):
            used = min(length - 1, window or length)
            rows = [getattr(own.draft.cache, name)[row, :, :used] for own in (drafter, fresh)]
            torch.testing.assert_close(*rows, **TOLERANCE)
    torch.testing.assert_close(drafter.draft.newest, fresh.draft.newest, **TOLERANCE)


def test_a_server_reads_prompts_in_chunks_between_rounds(tmp_path: Path) -> None:
    """Requests that come one after another, in rows that move, with prompts that share prefixes."""
    model = published_pair(tmp_path, window=16)
    prompts = [random_tokens(61)[:n].tolist() for n in (3, 40, 9, 61, 40)]
    drafting = Drafting("auto", tree_shape=(2, 4, 4))
    engine = RequestEngine(model, EngineSettings(drafting, 3, memory=2**28, prefill_chunk=16))
    engine.prepare()
    answers: list[list[Any]] = [[] for _ in prompts]
    for prompt, events in zip(prompts, answers, strict=True):
        engine.add(Request(prompt, max_new_tokens=14, sampling=Sampling()), events.append)
        engine.step()
        engine.step()
    while engine.step():
        pass
    for prompt, events in zip(prompts, answers, strict=True):
        assert ids(events) == target_greedy(model, torch.tensor(prompt), 14)


@pytest.mark.parametrize("window", [None, 16])
def test_the_memory_of_a_batch_counts_the_drafts_own_cache(tmp_path: Path, window: int | None) -> None:
    """With and without a known longest text, the batch's caches and rounds stay within the given memory."""
    model = published_pair(tmp_path, window=window)
    memory = 2**24
    for longest in (None, 4000):
        batch = RequestEngine(model, EngineSettings(Drafting("tree"), 8, memory, longest)).batch
        draft, target = batch.drafter.row_states(), [*batch.cache.keys, *batch.cache.values]
        taken = sum(state.nbytes for state in [*draft, *target])
        taken += len(batch.cache.lengths) * batch.drafter.nodes * VOCAB * ROUND_BYTES
        assert 0.4 * memory < taken <= memory


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 16])
@torch.no_grad()
def test_fused_passes_and_graphs_draft_as_plain_ones(tmp_path: Path, window: int | None) -> None:
    """In bf16, where the target's layers leave sums to the next norm, and with captured rounds in float32."""
    model = published_pair(tmp_path, window=window).to("cuda")
    prompts = [random_tokens(2, 41)[0, :9].tolist(), random_tokens(2, 41)[1].tolist()]
    expected = [target_greedy(model, torch.tensor(prompt), 24) for prompt in prompts]
    rounds = set()
    for compiled in (True, False):
        output = generate(model, prompts, method="tree", max_new_tokens=24, compile=compiled)
        assert [row.tolist() for row in output.new_tokens] == expected
        rounds.add(output.stats.rounds)
    assert len(rounds) == 1
    model.to(torch.bfloat16)
    newest = []
    for compiled in (True, False):
        runner = make_runner(model, "auto", compiled)
        drafter = TreeDrafter(runner, 2, (3, 5, 4), GREEDY, "descend")
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
        engine = StaticBatch(runner, drafter, GREEDY, rows.cuda(), [9, 41], 16)
        engine.prefill()
        engine.round(torch.ones(2, dtype=torch.bool, device="cuda"))
        newest.append(drafter.draft.newest)
    torch.testing.assert_close(*newest, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("copied", [True, False])
def test_files_of_the_speculators_library_load(tmp_path: Path, copied: bool) -> None:
    """With their names, their nested config and an embedding, which is the target's own or another one."""
    save_target(tmp_path, "llama", initializer_range=0.1)
    draft = tmp_path / "eagle"
    draft.mkdir()
    inner = {name: value for name, value in CONFIG.items() if name not in ("architectures", "draft_vocab_size")}
    config = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": LISTED}
    config |= {"transformer_layer_config": inner, "norm_before_residual": False}
    (draft / "config.json").write_text(json.dumps(config))
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    weights = published_weights("layers.0") | {"embed_tokens.weight": embedding if copied else embedding + 1}
    save_file(weights, draft / "model.safetensors")
    model = GLIDE["llama"].from_pretrained(tmp_path, glide_path=draft, torch_dtype=torch.float32)
    assert (model.draft_model.embed_tokens is None) == copied
    prompt = random_tokens(9)
    (found,) = generate(model, [prompt.tolist()], max_new_tokens=8).new_tokens
    assert found.tolist() == target_greedy(model, prompt, 8)


def test_saved_drafts_have_the_published_form_and_load_again(tmp_path: Path) -> None:
    """A folder has the published names and config. Folder and file restore options and weights."""
    model = published_pair(tmp_path, window=24)
    draft, options = model.draft_model, replace(model.draft_model.options, layers=(0, 2, 1))
    save_draft_folder(draft.state_dict(), model.config, tmp_path / "saved", options)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == published_weights().keys()
    assert all(torch.equal(saved[name], weight) for name, weight in published_weights().items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: config[name] for name in CONFIG if name != "max_position_embeddings"}.items() <= CONFIG.items()
    assert config["rope_theta"] == 10000.0 and config["eagle_aux_hidden_state_layer_ids"] == [0, 2, 1]
    save_draft_file(draft.state_dict(), tmp_path / "draft.pth", options)
    for path in (tmp_path / "saved", tmp_path / "draft.pth"):
        assert draft_settings(path).options == options
        again = GLIDE["llama"].from_pretrained(tmp_path, glide_path=path, torch_dtype=torch.float32)
        assert isinstance(again.draft_model, Eagle3Draft) and again.draft_model.window == 24
        assert again.draft_model.reads.layer_inputs == (0, 2, 1)
        assert torch.equal(again.draft_model.lm_head.weight, draft.lm_head.weight)
    # As another project's file, without this project's keys.
    for name in ("draft_architecture", "draft_options"):
        del config[name]
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    save_file(saved, tmp_path / "saved" / "model.safetensors")
    foreign = draft_settings(tmp_path / "saved").options
    assert foreign.layers == (0, 2, 1) and foreign.config(model.config).rope_parameters == options.rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "several layers or norm_before_fc"),
        ({"hidden_size": 16}, "embed_tokens.weight"),
        ({"rope_scaling": 3}, "rope: must be a mapping"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "reads layer 3, but this target has the layers 0 … 2"),
        ({"norm_output": "yes"}, "norm_output: must be true or false"),
        ({"num_key_value_heads": 3}, "no multiple of 3 key-value heads"),
        ({"head_dim": 15}, "head_dim is 15; rotary positions need a positive even number"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        published_pair(tmp_path, **change)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="depth: eagle3 has no such option"):
        Eagle3Options.checked({"depth": 3})
    target = save_target(tmp_path, "llama")
    with pytest.raises(UserError, match=r"model\.hidden_size: 65; a fresh draft starts with the target's head"):
        Eagle3Options(hidden_size=65).check_fresh(read_config(target), "model")
    assert GLIDE["llama"].from_pretrained(target, architecture="eagle3", window=64).draft_model.window == 64
    draft = GLIDE["llama"].from_pretrained(target, architecture="eagle3", draft_vocabulary=[3, 1, 60]).draft_model
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(draft.lm_head.weight, head[[1, 3, 60]]) and draft.lm_head.weight.requires_grad
    assert asdict(draft.options) == asdict(Eagle3Options())
