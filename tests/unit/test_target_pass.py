"""The target's pass in training: for several lags, on kernels, as a CUDA graph; and the parts of a split target."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, OPTIONS, Handed, make_pair, save_target, spread
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.errors import UserError
from longspec.kernels.training.segments import Segments
from longspec.models.glide import GlideMixin
from longspec.models.target_files import read_config
from longspec.models.target_graph import RUNS_BEFORE, TargetGraphs
from longspec.models.target_kernels import use_kernels
from longspec.models.target_split import check_shared, is_added_once, rank_folder, split_target
from longspec.train.loss import DraftLoss

B, T = 2, 12


def batch(device: str = "cpu") -> dict[str, Tensor]:
    tokens = torch.randint(1, 61, (B, T), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(4), 900 + torch.arange(4, T)]).expand(B, -1)
    borders = torch.tensor([0, 5, T, 2 * T], dtype=torch.int32)
    on_device = {"input_ids": tokens.to(device), "position_ids": positions.to(device)}
    return {"labels": tokens, "cu_seqlens": borders, **on_device}


@torch.no_grad()
def test_several_lags_share_one_pass_of_the_target(tmp_path: Path) -> None:
    """The results are those of each row of lags alone."""
    model: GlideMixin = make_pair(tmp_path)
    lags = torch.tensor([[1, 1, 1], [4, 2, 5]])
    objective = Handed(lambda hidden, target_hidden, labels, lm_head: hidden)
    alone = [model(**batch(), lags=row, objective=objective) for row in lags]
    counts: Counter[str] = Counter()
    model.model.layers[0].register_forward_hook(lambda *_: counts.update(["layer 0"]))
    together = model(**batch(), lags=lags, objective=objective)
    assert counts["layer 0"] == 1
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


ODD_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}


@pytest.mark.parametrize(("family", "overrides"), [("llama", ODD_HEADS), ("qwen2", {}), ("qwen3", {}), ("mistral", {})])
def test_elementwise_kernels_keep_results(tmp_path: Path, family: str, overrides: dict[str, Any], device: str) -> None:
    """Hidden states of target and draft, the modules that run, and calls by transformers are the same."""
    model: Any = make_pair(tmp_path, family, initializer_range=0.1, num_hidden_layers=2, **overrides).to(device)
    spread(model.model)
    objective = Handed(lambda *inputs: inputs[:2])
    inputs = batch(device)
    counts: Counter[str] = Counter()
    for name, module in model.model.named_modules():
        module.register_forward_hook(lambda *_, name=name: counts.update([name]))

    def run() -> tuple[Any, Counter[str]]:
        counts.clear()
        return model(**inputs, lags=torch.tensor([1, 5, 3]), objective=objective), counts.copy()

    expected, expected_counts = run()
    logits = model(inputs["input_ids"]).logits
    use_kernels(model.model, model.draft_layer_class)
    forwards = [module for module in model.model.modules() if "forward" in vars(module)]
    per_layer = 6 if hasattr(model.model.layers[0].self_attn, "q_norm") else 4
    assert len(forwards) == per_layer * model.config.num_hidden_layers + 1
    got, got_counts = run()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert {name: n for name, n in expected_counts.items() if "act_fn" not in name} == got_counts
    torch.testing.assert_close(model(inputs["input_ids"]).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["base", "sinkpi-slicing"])
@pytest.mark.parametrize(("loss", "kind"), [("ce", "published"), ("mixed", "published"), ("ce", "both")])
def test_the_host_never_waits_for_a_device_in_a_micro_batch(tmp_path: Path, variant: str, loss: str, kind: str) -> None:
    model: Any = make_pair(tmp_path, dtype=torch.bfloat16, options=OPTIONS[kind]).cuda()
    use_kernels(model.model, model.draft_layer_class)
    lags = None if variant == "base" else torch.tensor([1, 5, 3])
    inputs = batch("cuda") | {"lags": lags, "objective": DraftLoss(loss)}
    model(**inputs)[0].backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_captured_pass_is_the_plain_one(tmp_path: Path, family: str) -> None:
    """Whatever tokens, positions and segments come, and in which order."""
    options = OPTIONS["kv_layers"] if family == "llama" else OPTIONS["published"]
    model: Any = make_pair(tmp_path, family, torch.bfloat16, options=options).cuda()
    use_kernels(model.model, model.draft_layer_class)
    passes = TargetGraphs(model.run_target, layer_weights=1)
    generator = torch.Generator().manual_seed(0)
    for number, inner in enumerate(([], [5, 100], [], [1, 2, 127], [63, 65], [])):
        tokens = torch.randint(1, 61, (2, 64), generator=generator).cuda()
        segments = Segments(sorted([0, 64, 128, *inner]), tokens.device)
        positions = (segments.offsets + 100 * number).view(2, 64)
        got = passes(tokens, positions, segments)
        assert len(got[1]) == 1 + len(options.kv_layers)
        torch.testing.assert_close(got, model.run_target(tokens, positions, segments))
    assert len(passes.graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("loss", "kind"), [("ce", "published"), ("distill", "published"), ("ce", "both")])
def test_training_on_captured_passes_is_training(tmp_path: Path, loss: str, kind: str) -> None:
    """Losses and gradients by step, also of a pass read at several lags, or begun before, or begun for other tokens."""
    model: Any = make_pair(tmp_path, "llama", torch.bfloat16, options=OPTIONS[kind]).cuda()
    use_kernels(model.model, model.draft_layer_class)
    graphs, generator = TargetGraphs(model.run_target, layer_weights=1), torch.Generator().manual_seed(0)
    objective = DraftLoss(loss)
    for step in range(RUNS_BEFORE + 3):
        tokens = torch.randint(1, 61, (2, 64), generator=generator)
        ids = tokens.cuda()
        borders = torch.tensor([0, 10 + step, 64, 128], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(length)) for length in borders.diff()]).view(2, 64).cuda()
        lags = torch.tensor([[1, 5, 3], [2, 2, 4]]) if step % 2 else torch.tensor([1, 5, 3])
        found = []
        for run in (None, graphs):
            model.target_pass = run
            if run:
                segments = Segments(borders.tolist(), ids.device)
                run.begin(ids if step % 3 else ids.flip(0), positions, segments)
            out = model(ids, position_ids=positions, labels=tokens, cu_seqlens=borders, lags=lags, objective=objective)
            total = sum(one for one, _ in out) if step % 2 else out[0]
            model.draft_model.zero_grad()
            total.backward()
            found.append([total.detach(), *(weight.grad.clone() for weight in model.draft_model.parameters())])
        torch.testing.assert_close(found[1], found[0])
    assert len(graphs.graphs) == 1


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "vocab_size": 60},
    {"num_key_value_heads": 4},
    {"head_dim": 16, "hidden_size": 48},
]


def parts_of(folder: Path, world: int) -> list[dict[str, Tensor]]:
    """Each rank's weights, in order of rank."""
    folders = [folder / rank_folder(rank, world) for rank in range(world)]
    return [{k: w for file in place.glob("*.safetensors") for k, w in load_file(file).items()} for place in folders]


def rejoined(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    pieces = [part[name] for part in parts]
    if "norm" in name or is_added_once(name):
        return pieces[0]
    return torch.cat(pieces, 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0)


@pytest.mark.parametrize(("family", "layout"), [*zip(FAMILIES, LAYOUTS, strict=True), ("qwen2", {}), ("qwen3", {})])
def test_parts_rejoin_to_every_byte_and_each_loads_alone(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    """61 tokens for two ranks: 31 and 30. Tied embeddings are written once and tied again by each part."""
    source = save_target(tmp_path / "target", family, **layout)
    split_target(source, tmp_path / "split", 2)
    whole, parts = load_file(source / "model.safetensors"), parts_of(tmp_path / "split", 2)
    assert all(part.keys() == whole.keys() for part in parts)
    for name, weight in whole.items():
        assert torch.equal(rejoined(parts, name), weight), name
    for rank in range(2):
        folder = tmp_path / "split" / rank_folder(rank, 2)
        model, said = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not any(said.values()), said
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        assert tied == layout.get("tie_word_embeddings", False)


def test_a_bias_of_summed_products_is_added_by_one_rank(tmp_path: Path) -> None:
    source = save_target(tmp_path / "target", "llama", attention_bias=True, mlp_bias=True)
    weights = {name: torch.rand_like(weight) for name, weight in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    split_target(source, tmp_path / "split", 2)
    parts = parts_of(tmp_path / "split", 2)
    for name, weight in weights.items():
        assert torch.equal(rejoined(parts, name), weight), name
        assert is_added_once(name) == (not parts[1][name].any())


@pytest.mark.parametrize("form", ["index.json", "bin", "bin of torch before 1.6", "sharded bin"])
def test_every_form_of_a_hub_checkpoint_gives_the_same_parts(form: str, tmp_path: Path) -> None:
    source = save_target(tmp_path / "target", "llama", tie_word_embeddings=form.startswith("bin"))
    split_target(source, tmp_path / "expected", 2)
    weights = load_file(source / "model.safetensors")
    if form.startswith("bin"):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # .bin files often hold both of a tied pair
    (source / "model.safetensors").unlink()
    names, kind = list(weights), "safetensors" if form == "index.json" else "bin"
    halves = [names] if form.startswith("bin") else [names[::2], names[1::2]]
    files = [f"part-{number}.{kind}" for number in range(len(halves))] if len(halves) > 1 else ["pytorch_model.bin"]
    for file, half in zip(files, halves, strict=True):
        some = {name: weights[name] for name in half}
        if kind == "safetensors":
            save_file(some, source / file)
        else:
            torch.save(some, source / file, _use_new_zipfile_serialization="1.6" not in form)
    if len(files) > 1:
        index = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
        owners = {name: file for file, half in zip(files, halves, strict=True) for name in half}
        (source / index).write_text(json.dumps({"weight_map": owners}))
    split_target(source, tmp_path / "split", 2)
    for found, expected in zip(parts_of(tmp_path / "split", 2), parts_of(tmp_path / "expected", 2), strict=True):
        assert found.keys() - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "split" / rank_folder(1, 2))


@pytest.mark.parametrize(
    ("layout", "world", "part"),
    [
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads 1 cannot be split for 2 ranks"),
        ({"num_attention_heads": 6, "hidden_size": 48}, 4, "num_key_value_heads 2"),
        ({"intermediate_size": 49}, 2, "intermediate_size 49"),
        ({"vocab_size": 5, "num_key_value_heads": 4}, 4, "5 tokens are too few for 4 ranks"),
    ],
)
def test_what_cannot_be_split_is_one_line(layout: dict[str, Any], world: int, part: str, tmp_path: Path) -> None:
    source = save_target(tmp_path / "target", "llama", **layout)
    with pytest.raises(UserError, match=part):
        split_target(source, tmp_path / "split", world)
    assert not (tmp_path / "split").exists()


def test_ranks_in_decoding_share_a_target_whole_or_in_parts(tmp_path: Path) -> None:
    source = save_target(tmp_path / "target", "llama")
    split_target(source, tmp_path / "split", 2)
    config = read_config(source)
    for folder in (source, tmp_path / "split"):
        check_shared(config, 2, folder)
    with pytest.raises(UserError, match="num_key_value_heads 2 cannot be split for 4 ranks"):
        check_shared(config, 4, source)
    shutil.rmtree(tmp_path / "split" / "mp_1-of-2")
    with pytest.raises(UserError, match="holds no mp_1-of-2"):
        check_shared(config, 2, tmp_path / "split")
    with pytest.raises(UserError, match="split for 2 ranks; it needs tp_size 2"):
        check_shared(config, 1, tmp_path / "split")
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(UserError, match="a quantized target, which cannot be split"):
        check_shared(config, 2, source)


def test_damaged_and_foreign_weights_leave_nothing(tmp_path: Path) -> None:
    """A cut-off file and quantized weights: one line, and no output."""
    source, output = save_target(tmp_path / "target", "llama"), tmp_path / "split"
    good = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(good[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        split_target(source, output, 2)
    save_file({"model.layers.0.mlp.up_proj.qweight": torch.ones(2, 2)}, source / "model.safetensors")
    with pytest.raises(UserError, match="qweight: not a weight of a supported target"):
        split_target(source, output, 2)
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, source / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj\.weight: stored as torch\.float8_e4m3fn"):
        split_target(source, output, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (source / "model.safetensors").write_bytes(good)
    split_target(source, output, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split", "target"]
