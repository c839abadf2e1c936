"""How a target and its draft are built, and `load_pair`, which makes them ready to generate."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairs import FAMILIES, GLIDE, make_pair, save_target, tiny_config
from safetensors.torch import load_file, save_file
from training_fixtures import ROOT, make_target
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import longspec
from longspec import generate, load_pair
from longspec.errors import UserError
from longspec.inference import registry
from longspec.inference.device import choose_dtype
from longspec.models.families import family_class, pair_class
from longspec.models.parallel import PretrainedModelParallelPreSplitMixin
from longspec.models.target_files import position_limit
from longspec.train.models.llama_glide import LlamaGlide, LlamaGlideDecoderLayer
from longspec.train.models.qwen2_glide import Qwen2Glide, Qwen2GlideDecoderLayer
from longspec.untrusted import read_yaml


@pytest.mark.parametrize("family", FAMILIES)
def test_pair_classes_are_transformers_own_and_public(family: str) -> None:
    """Each has a training configuration."""
    pair, name = GLIDE[family], f"{family.capitalize()}Glide"
    causal_lm = getattr(transformers, name.replace("Glide", "ForCausalLM"))
    assert issubclass(pair, causal_lm) and issubclass(pair, PretrainedModelParallelPreSplitMixin)
    assert name in longspec.__all__ and getattr(longspec, name) is pair
    assert pair_class(f"longspec.{name}.from_pretrained") is pair
    assert pair_class(read_yaml(ROOT / f"conf/model/{family}.yaml")["model"]["_target_"]) is pair


@pytest.mark.parametrize("family", FAMILIES)
def test_constructor_loads_the_target_in_float16_and_freezes_it(tmp_path: Path, family: str) -> None:
    save_target(tmp_path, family)
    model = GLIDE[family](tiny_config(family), target_model_path=tmp_path, glide_path=None)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if name.startswith("draft_model.")}
    assert not any(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())


@pytest.mark.parametrize("family", FAMILIES)
def test_target_weights_and_logits_are_the_files(tmp_path: Path, family: str) -> None:
    """Tied embeddings stay tied."""
    model = make_pair(tmp_path, family, tie_word_embeddings=family == "qwen2")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (family == "qwen2")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits)


def test_fresh_draft_has_the_stated_initialisation(tmp_path: Path) -> None:
    """Weights N(0, initializer_range), biases 0, norms 1."""
    draft = make_pair(tmp_path, hidden_size=64, intermediate_size=256, initializer_range=0.05).draft_model
    for name, parameter in draft.named_parameters():
        if name.endswith("bias"):
            assert torch.all(parameter == 0), name
        elif "layernorm" in name:
            assert torch.all(parameter == 1), name
        else:
            assert abs(parameter.std().item() - 0.05) < 0.005 and abs(parameter.mean().item()) < 0.005, name


def test_state_dict_route_takes_weights_with_and_without_prefix(tmp_path: Path) -> None:
    source = make_pair(tmp_path).draft_model.state_dict()
    given: dict[str, Any] = {"torch_dtype": "float32", "attn_implementation": "flash_attention_2", "pad_token_id": 5}
    for prefix in ("", "draft_model."):
        given["state_dict"] = {prefix + name: weight for name, weight in source.items()}
        given |= {"gradient_checkpointing": True, "ignore_mismatched_sizes": True}
        loaded = LlamaGlide.from_pretrained(tmp_path, **given)
        assert all(torch.equal(weight, source[name]) for name, weight in loaded.draft_model.state_dict().items())
        assert loaded.gradient_checkpointing and loaded.config.pad_token_id == 5


def test_every_family_has_the_published_draft() -> None:
    """The same weights, whatever the target's attention; configs of the published drafts import two of the layers."""
    assert GLIDE["llama"].draft_layer_class is LlamaGlideDecoderLayer
    assert GLIDE["qwen2"].draft_layer_class is Qwen2GlideDecoderLayer
    layers = [GLIDE[family].draft_layer_class(tiny_config(family, head_dim=16)) for family in FAMILIES]
    shapes = [{name: weight.shape for name, weight in layer.named_parameters()} for layer in layers]
    assert all(other == shapes[0] for other in shapes)


def test_other_family_is_one_clear_line(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    with pytest.raises(UserError, match="a llama target; Qwen2Glide takes qwen2 targets"):
        Qwen2Glide.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "layer 1 of this target"),
        ("qwen3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "has sliding_attention"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "a ministral target"),  # as transformers names it
        ("mistral", {"sliding_window": 4096}, "a target with sliding_window 4096"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, None),
        ("llama", {"sliding_window": 4096}, None),  # of a target that was a Mistral target
    ],
)
def test_targets_with_sliding_windows_that_layers_use_are_refused_by_name(
    tmp_path: Path, family: str, settings: dict[str, Any], named: str | None
) -> None:
    save_target(tmp_path, family, **settings)
    with pytest.raises(UserError, match=f"{tmp_path}: .*{named}") if named else nullcontext():
        GLIDE[family].from_pretrained(tmp_path)
    with pytest.raises(UserError, match="a target with sliding_window 4096"):  # Mistral ignores layer_types
        family_class(tiny_config("mistral", sliding_window=4096, layer_types=["full_attention"] * 3), "target")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_that_follows_the_length_is_refused(tmp_path: Path, kind: str) -> None:
    """Its cached keys would change meaning from call to call, so no cache could be lossless."""
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UserError, match=f"{kind} rotary scaling"):
        LlamaGlide(config, tmp_path)


def test_target_with_a_missing_weight_is_refused(tmp_path: Path) -> None:
    """transformers would fill it with random numbers and go on. One of the wrong shape is refused as well."""
    save_target(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.layers.2.mlp.down_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="incomplete target: 2 weights are missing"):
        LlamaGlide.from_pretrained(tmp_path)


def test_draft_is_checked_before_the_target_is_loaded(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"unreadable")
    with pytest.raises(UserError, match="no such draft"):
        LlamaGlide.from_pretrained(tmp_path, glide_path=tmp_path / "missing.pth")
    with pytest.raises(UserError, match="weights do not load"):
        LlamaGlide.from_pretrained(tmp_path)


def test_position_limit_counts_the_scaling() -> None:
    """Linear: the length before scaling is stated. YaRN: either may be stated. llama3: the length after."""
    for rope, positions, limit in (
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096, 4096),
    ):
        config = tiny_config("llama", max_position_embeddings=positions)
        config.rope_parameters = rope | {"rope_theta": 10000.0}
        assert position_limit(config) == limit


def test_a_target_without_a_draft_generates_and_a_draft_is_loaded_if_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "target")
    logging.enable_progress_bar()
    capsys.readouterr()
    pair, tokenizer = load_pair(target, dtype=torch.float64)
    assert pair.dtype == torch.float64 and not pair.training
    prompt = tokenizer("the target reads", return_tensors="pt")["input_ids"]
    assert len(generate(pair, prompt, method="magicdec", max_new_tokens=5).new_tokens[0]) <= 5
    torch.save(pair.draft_model.state_dict(), tmp_path / "draft.pth")
    again, _ = load_pair(target, draft=tmp_path / "draft.pth")
    assert not capsys.readouterr().err and logging.is_progress_bar_enabled(), "no bar, and the user's setting stays"
    assert again.dtype == torch.float32
    for name, weight in again.draft_model.state_dict().items():
        torch.testing.assert_close(weight, pair.draft_model.state_dict()[name].float(), rtol=0, atol=0)


def test_published_and_embedded_drafts_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DRAFTS", tmp_path)
    monkeypatch.setattr(registry, "resolve_target", lambda name: f"folder of {name}")
    for name, folder in registry.EMBEDDED_DRAFTS.items():
        assert registry.choose_pair(name).draft is None
        (tmp_path / folder).mkdir()
        pair = registry.choose_pair(name)
        assert (pair.target, pair.draft) == (f"folder of {name}", str(tmp_path / folder))
        assert registry.choose_pair(name, "mine").draft == "mine"
    assert registry.choose_pair(None) == registry.choose_pair("smollm2-135m")
    with pytest.raises(UserError, match=r"^--model: empty"):
        registry.choose_pair("")
    assert list(registry.PUBLISHED_PAIRS) == ["vicuna7b", "vicuna13b", "longchat7b", "longchat13b", "llama8b", "qwq"]
    assert registry.choose_pair("llama8b").draft == "sail/longspec-Llama-3-8B-Instruct-262k"


def test_a_cast_target_is_otherwise_the_same(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", eos_token_id=[7, 9])
    own, other = (load_pair(str(target), dtype=dtype)[0] for dtype in ("float32", torch.float64))
    assert other.config.name_or_path == own.config.name_or_path == str(target)
    assert other.generation_config.to_dict() == own.generation_config.to_dict()
    for name, weight in load_file(target / "model.safetensors").items():
        assert torch.equal(own.get_parameter(name).data, weight)
        assert torch.equal(other.get_parameter(name).data, weight.double())


def test_a_weight_file_with_more_than_weights_is_one_line(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    state = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    torch.save(state, target / "pytorch_model.bin")
    assert load_pair(str(target), dtype="bfloat16")[0].dtype == torch.bfloat16
    torch.save(state | {"epoch": 3}, target / "pytorch_model.bin")
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(UserError, match=r"epoch would be ignored|not a dictionary of plain weights"):
            load_pair(str(target), dtype=dtype)


@pytest.mark.parametrize(("device", "message"), [("tpu!", "not s"), ("meta", "not s"), ("cuda:99", "has")])
def test_a_device_that_is_not_there_is_one_line(device: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"device: .*{message}"):
        load_pair("smollm2-135m", device=device)


def test_a_published_generation_config_can_be_saved_again(tmp_path: Path) -> None:
    """Vicuna's has a temperature without do_sample, which transformers refuses to save in a config that was changed."""
    target = make_target(tmp_path / "target", eos_token_id=7)
    file = target / "generation_config.json"
    settings = {**json.loads(file.read_text()), "temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps(settings))
    pair, tokenizer = load_pair(str(target))
    pair.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved == {**settings, "eos_token_id": [7, tokenizer.eos_token_id]}
    LlamaGlide.from_pretrained(target, pad_token_id=3).save_pretrained(tmp_path / "padded")
    assert json.loads((tmp_path / "padded" / "generation_config.json").read_text())["pad_token_id"] == 3


def test_an_adapter_in_the_folder_is_refused(tmp_path: Path) -> None:
    """It would not be applied, with or without the model's own files next to it."""
    for folder in (make_target(tmp_path / "target"), tmp_path):
        for name in ("adapter_config.json", "adapter_0.pt", "pytorch_lora_weights.safetensors"):
            (folder / name).write_text("{}")
            with pytest.raises(UserError, match=rf"holds an adapter \({name}\)"):
                load_pair(str(folder))
            (folder / name).unlink()


def test_special_tokens_that_are_no_ids_are_one_line(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    for ids in ("2", True, [2, "3"]):
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(UserError, match=r"eos_token_id .* is not a token id"):
            load_pair(str(target))


def test_the_dtype_is_the_targets_own_and_float32_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_dtype("auto", config, torch.device("cuda")) == torch.float16
    assert "float16" in caplog.text and len(caplog.records) == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert choose_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert choose_dtype("auto", config, torch.device("cpu")) == torch.float32
    assert choose_dtype("float16", config, torch.device("cpu")) == torch.float16
