"""`load_pair`: ready to generate, with the draft that was asked for, and one line for what it cannot load."""

from pathlib import Path

import pytest
import torch
from training_fixtures import make_target

from longspec import generate, load_pair
from longspec.errors import UserError
from longspec.inference import registry


def test_a_target_without_a_draft_generates_and_a_draft_is_loaded_if_given(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    pair, tokenizer = load_pair(str(target), dtype=torch.float64)
    assert pair.dtype == torch.float64 and not pair.training
    prompt = tokenizer("the target reads", return_tensors="pt")["input_ids"]
    assert len(generate(pair, prompt, method="magicdec", max_new_tokens=5).new_tokens[0]) <= 5
    torch.save(pair.draft_model.state_dict(), tmp_path / "draft.pth")
    again, _ = load_pair(str(target), draft=str(tmp_path / "draft.pth"))
    assert again.dtype == torch.float32
    for name, weight in again.draft_model.state_dict().items():
        torch.testing.assert_close(weight, pair.draft_model.state_dict()[name].float(), rtol=0, atol=0)


def test_the_embedded_draft_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "DRAFTS", tmp_path)
    monkeypatch.setattr(registry, "resolve_target", lambda name: f"folder of {name}")
    assert registry.choose_pair("smollm2-135m", None, None).draft is None
    (tmp_path / registry.SMOLLM2_DRAFT).mkdir()
    pair = registry.choose_pair("smollm2-135m", None, None)
    assert (pair.target, pair.draft) == ("folder of smollm2-135m", str(tmp_path / registry.SMOLLM2_DRAFT))
    assert registry.choose_pair("smollm2-135m", None, "mine").draft == "mine"
    assert registry.choose_pair(None, None, None) == pair


@pytest.mark.parametrize(("device", "message"), [("tpu!", "a device"), ("meta", "not supported"), ("cuda:99", "has")])
def test_a_device_that_is_not_there_is_one_line(device: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"device: .*{message}"):
        load_pair("smollm2-135m", device=device)


def test_all_tokens_that_end_an_answer_are_the_targets_own(tmp_path: Path) -> None:
    """Those of generation_config.json, and the tokenizer's."""
    target = make_target(tmp_path / "target", eos_token_id=[7, 9])
    pair, tokenizer = load_pair(str(target))
    assert pair.generation_config.eos_token_id == [7, 9, tokenizer.eos_token_id]
