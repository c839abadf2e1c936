"""A pair loads and saves with transformers' conventions, and its draft is never lost on the way."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, constants, errors
from pairs import FAMILIES, GLIDE, make_pair, save_target, tiny_config
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from longspec.errors import UserError
from longspec.inference.registry import choose_pair
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import PUBLISHED, DraftOptions
from longspec.models.glide import GlideMixin
from longspec.models.llama import LlamaGlide, LlamaGlideDecoderLayer
from longspec.models.target_files import read_config


def weights_equal(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def saved_pair(folder: Path, family: str = "llama", **overrides: Any) -> GlideMixin:
    """A pair with a window of its own, saved in folder/pair."""
    pair = make_pair(folder / "target", family, **overrides)
    pair.draft_model.window = 77
    pair.save_pretrained(folder / "pair")
    return pair


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True)])
def test_a_saved_pair_comes_back_whole(tmp_path: Path, family: str, tied: bool) -> None:
    options = DraftOptions(kv_layers=(1,), target_feature=True, mlp_size=48) if tied else PUBLISHED
    pair = saved_pair(tmp_path, family, options=options, tie_word_embeddings=tied)
    back = GLIDE[family].from_pretrained(tmp_path / "pair")
    assert weights_equal(pair, back)
    assert back.draft_model.options == replace(options, window=77) and back.draft_is_trained
    parameters = dict(back.named_parameters())
    assert all(parameters[name].requires_grad == name.startswith("draft_model.") for name in parameters)
    back.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 1
    assert weights_equal(pair, GLIDE[family].from_pretrained(tmp_path / "again"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_pair_is_an_ordinary_target_for_transformers(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = saved_pair(tmp_path, family)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        plain, info = AutoModelForCausalLM.from_pretrained(tmp_path / "pair", output_loading_info=True)
    assert not any(info.values()) and not caplog.records
    assert type(plain) is GLIDE[family].target_class
    assert json.loads((tmp_path / "pair" / "config.json").read_text())["architectures"] == [type(plain).__name__]
    assert weights_equal(plain.model, pair.model)


def test_a_saved_pairs_draft_is_found_by_every_route(tmp_path: Path) -> None:
    """As --draft, as --target alone, and as the draft's own folder."""
    saved_pair(tmp_path)
    folder = str(tmp_path / "pair")
    assert choose_pair(folder).draft == folder
    for path in (folder, f"{folder}/draft", f"{folder}/draft/model.safetensors"):
        assert draft_settings(path).options.window == 77
        assert check_draft(path, tiny_config("llama"), LlamaGlideDecoderLayer)


def test_a_fresh_draft_is_untrained_until_weights_come(tmp_path: Path) -> None:
    """Also through a save: otherwise random weights would pass for trained ones."""
    save_target(tmp_path / "target", "llama")
    fresh = LlamaGlide.from_pretrained(tmp_path / "target")
    assert not fresh.draft_is_trained
    fresh.save_pretrained(tmp_path / "pair")
    back = LlamaGlide.from_pretrained(tmp_path / "pair")
    assert not back.draft_is_trained and not draft_settings(tmp_path / "pair").is_trained
    assert weights_equal(fresh, back)
    back.load_draft_state(fresh.draft_model.state_dict(), "state_dict")
    assert back.draft_is_trained


def test_a_push_to_the_hub_uploads_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: dict[str, Any] = {}

    def create_repo(self: HfApi, repo_id: str, **options: Any) -> Any:
        return type("Url", (), {"repo_id": repo_id})

    def create_commit(self: HfApi, repo_id: str, operations: Any, **options: Any) -> None:
        for operation in operations:
            if operation.path_in_repo == "draft/model.safetensors":
                with safe_open(operation.path_or_fileobj, "pt") as weights:
                    uploaded["window"] = weights.metadata()["draft_window"]
            uploaded[operation.path_in_repo] = repo_id

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    pair = make_pair(tmp_path / "target")
    pair.draft_model.window = 77
    with pytest.raises(UserError, match="takes neither push_to_hub"):
        pair.save_pretrained(tmp_path / "pair", push_to_hub=True)
    pair.push_to_hub("someone/pair")
    assert uploaded.pop("window") == "77"
    expected = {"config.json", "model.safetensors", "draft/config.json", "draft/model.safetensors"}
    assert expected <= uploaded.keys() and set(uploaded.values()) == {"someone/pair"}


def test_a_pair_on_the_hub_loads_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a cache as the hub's client leaves it: snapshots of links to blobs, and a reference for each revision."""
    repo = tmp_path / "cache" / "models--someone--pair"
    for number, (revision, window) in enumerate({"main": 64, "v2": 96}.items()):
        commit = str(number) * 40
        pair = make_pair(tmp_path / revision / "target", seed=number)
        pair.draft_model.window = window
        pair.save_pretrained(tmp_path / revision / "pair")
        for file in (tmp_path / revision / "pair").rglob("*.*"):
            link = repo / "snapshots" / commit / file.relative_to(tmp_path / revision / "pair")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / revision).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert LlamaGlide.from_pretrained("someone/pair").draft_model.window == 64
    second = LlamaGlide.from_pretrained("someone/pair", revision="v2")
    assert second.draft_model.window == 96 and weights_equal(second, pair)


def test_without_the_hub_an_unknown_id_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waits before another request"))
    answer = errors.HfHubHTTPError("503", response=Mock(status_code=503))
    for info in (HfApi.model_info, Mock(side_effect=answer)):  # nobody listens, or a proxy without a network does
        monkeypatch.setattr(HfApi, "model_info", info)
        with pytest.raises(UserError, match=r"^someone/target: no such folder, and the hub cannot be reached"):
            read_config("someone/target")


def test_dtype_is_the_files_unless_given(tmp_path: Path) -> None:
    """The constructor keeps its float16."""
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config("llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    for given, dtype in (
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16),
    ):
        model = LlamaGlide.from_pretrained(tmp_path, **given)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert not any(module.training for module in model.modules())
    assert LlamaGlide(tiny_config("llama"), tmp_path).dtype == torch.float16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window"),
        ({"window": "many"}, "window"),
        ({"kv_layers": [2]}, "the draft's kv_layers contain layer 2, but this target of 3 layers"),
        ({"dtype": "flaot16"}, "^dtype: 'flaot16' is not"),
        ({"device_map": "nowhere"}, "nowhere"),
    ],
)
def test_a_wrong_argument_is_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    save_target(tmp_path, "llama")
    with pytest.raises(UserError, match=message):
        LlamaGlide.from_pretrained(tmp_path, **arguments)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kv_layers": [0]}, r"'kv_layers': \[0\]} contradicts .* has .*kv_layers=\(1,\)"),
        ({"target_feature": True}, "{'target_feature': True} contradicts"),
    ],
)
def test_a_saved_draft_keeps_its_options(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    """Two drafts that read different layers have weights of the same shapes."""
    pair = saved_pair(tmp_path, options=DraftOptions(kv_layers=(1,)))
    with pytest.raises(UserError, match=message):
        LlamaGlide.from_pretrained(tmp_path / "pair", **asked)
    same = LlamaGlide.from_pretrained(tmp_path / "pair", kv_layers=[1], target_feature=False, window=64)
    assert weights_equal(pair, same) and same.draft_model.options == DraftOptions(64, (1,))


@register_quantization_config("signs")
class SignsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    def __init__(self, **_: Any) -> None:
        self.quant_method = "signs"


class SignLinear(nn.Module):
    """Stands for a quantized linear: int8 weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.sign().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


@register_quantizer("signs")
class SignQuantizer(HfQuantizer):  # type: ignore[misc]
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for layer in model.model.layers:
            layer.mlp.up_proj = SignLinear(layer.mlp.up_proj)
        return model


def test_a_quantized_target_has_a_draft_in_the_compute_dtype(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    settings = {"quantization_config": SignsConfig(), "device_map": {"": "cpu"}}
    model = LlamaGlide.from_pretrained(tmp_path, dtype="bfloat16", **settings)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    assert {parameter.dtype for parameter in model.draft_model.parameters()} == {torch.bfloat16}
    assert model.is_quantized and model.quantization_method == "signs" and model.hf_quantizer is not None
    assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()


def test_a_quantizer_that_is_not_installed_is_one_clear_line(tmp_path: Path) -> None:
    save_target(tmp_path, "llama")
    with pytest.raises(UserError, match=r"weights do not load.*\Z"):
        LlamaGlide.from_pretrained(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})


UP = "model.layers.1.mlp.up_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantized_files(folder: Path, dtype: str | None, others: dict[str, float], method: Any = None) -> Path:
    """A target with one matrix in another dtype, with other weights [1] of these values, and with this method."""
    state = load_file(save_target(folder, "llama") / "model.safetensors")
    if dtype is not None:
        state[f"{UP}.weight"] = state[f"{UP}.weight"].to(getattr(torch, dtype))
    state |= {f"{UP}.{name}": torch.full((1,), value) for name, value in others.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    if method is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return folder


@pytest.mark.parametrize(
    ("dtype", "others", "method", "problem"),
    [
        ("float8_e4m3fn", {}, None, f"weight {UP}.weight would be misread, stored as F8_E4M3"),
        ("float8_e4m3fn", {"weight_scale": 1.0}, {"quant_method": "modelopt"}, "quant_method 'modelopt'"),
        ("float8_e4m3fn", {"input_scale": 1.0}, FP8, f"weight {UP}.weight .* no scale for method fp8"),
        ("int8", {}, None, f"weight {UP}.weight would be misread, stored as I8"),
        (None, {"weight_scale": 1.0}, None, f"weight {UP}.weight_scale would be ignored"),
        (None, {"bias": 1.0}, None, f"weight {UP}.bias would be ignored"),
        (None, {"lora_A.weight": 1.0, "lora_B.weight": 1.0}, None, f"weight {UP}.lora_A.weight and 1 others"),
    ],
)
def test_weights_that_would_be_misread_are_named(
    tmp_path: Path, dtype: str | None, others: dict[str, float], method: Any, problem: str
) -> None:
    """transformers casts float8 and integers, and ignores scales and biases that the model does not have."""
    with pytest.raises(UserError, match=problem):
        LlamaGlide.from_pretrained(quantized_files(tmp_path, dtype, others, method))


def test_weights_without_effect_are_ignored(tmp_path: Path) -> None:
    """GPTQ's biases of zeros, scales of a float8 KV cache, and rotary tables of old checkpoints."""
    others = {"bias": 0.0, "k_scale": 2.0, "rotary_emb.inv_freq": 1.0, "rotary_emb.cos_cached": 1.0}
    assert LlamaGlide.from_pretrained(quantized_files(tmp_path, None, others))
