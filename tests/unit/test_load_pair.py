"""`load_pair`: ready to generate, with the draft that was asked for, and one line for what it cannot load."""

import json
from pathlib import Path

import pytest
import torch
from pairs import tiny_config
from safetensors.torch import load_file
from training_fixtures import make_target
from transformers.utils import logging

from longspec import LlamaGlide, generate, load_pair
from longspec.errors import UserError
from longspec.inference import registry
from longspec.inference.device import choose_dtype


def test_a_target_without_a_draft_generates_and_a_draft_is_loaded_if_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_target(tmp_path / "target")
    logging.enable_progress_bar()
    capsys.readouterr()
    pair, tokenizer = load_pair(str(target), dtype=torch.float64)
    assert pair.dtype == torch.float64 and not pair.training
    prompt = tokenizer("the target reads", return_tensors="pt")["input_ids"]
    assert len(generate(pair, prompt, method="magicdec", max_new_tokens=5).new_tokens[0]) <= 5
    torch.save(pair.draft_model.state_dict(), tmp_path / "draft.pth")
    again, _ = load_pair(str(target), draft=str(tmp_path / "draft.pth"))
    assert not capsys.readouterr().err and logging.is_progress_bar_enabled(), "no bar, and the user's setting stays"
    assert again.dtype == torch.float32
    for name, weight in again.draft_model.state_dict().items():
        torch.testing.assert_close(weight, pair.draft_model.state_dict()[name].float(), rtol=0, atol=0)


def test_the_embedded_draft_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DRAFTS", tmp_path)
    monkeypatch.setattr(registry, "resolve_target", lambda name: f"folder of {name}")
    for name, folder in registry.EMBEDDED_DRAFTS.items():
        assert registry.choose_pair(name).draft is None
        (tmp_path / folder).mkdir()
        pair = registry.choose_pair(name)
        assert (pair.target, pair.draft) == (f"folder of {name}", str(tmp_path / folder))
        assert registry.choose_pair(name, "mine").draft == "mine"
    assert registry.choose_pair(None) == registry.choose_pair("smollm2-135m")


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
