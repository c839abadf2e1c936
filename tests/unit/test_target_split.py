"""The parts of a split target: every byte of it, each rank's share of them, and what cannot be split."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import FAMILIES, save_target
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspec.errors import UserError
from longspec.models.target_files import read_config
from longspec.models.target_split import check_shared, is_added_once, rank_folder, split_target

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
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, source / "model.safetensors"
    )
    with pytest.raises(UserError, match=r"up_proj\.weight: stored as torch\.float8_e4m3fn"):
        split_target(source, output, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (source / "model.safetensors").write_bytes(good)
    split_target(source, output, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split", "target"]
