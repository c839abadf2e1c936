"""Targets and drafts are told apart by content, wherever their files are."""

import os
from pathlib import Path

import pytest
import torch
from pairs import save_target, tiny_config

from longspec.models import content
from longspec.models.content import state_digest, target_digest

CONFIG = tiny_config("llama")


@pytest.mark.parametrize("whole", [content.WHOLE, 0])
def test_a_target_is_known_by_its_weights_and_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    """Of files above `whole` bytes samples are read; path and modification time do not count."""
    monkeypatch.setattr(content, "WHOLE", whole)
    monkeypatch.setattr(content, "STRIDE", 4096)
    monkeypatch.setattr(content, "BLOCK", 64)
    folders = [save_target(tmp_path / name, "llama", seed) for name, seed in (("one", 0), ("copy", 0), ("other", 1))]
    os.utime(folders[1] / "model.safetensors", (0, 0))
    one, copy, other = (target_digest(str(folder), CONFIG) for folder in folders)
    assert one == copy != other
    (folders[0] / "notes.txt").write_text("not part of the model")
    assert target_digest(str(folders[0]), CONFIG) == one
    for name in ("model.safetensors", "generation_config.json"):
        with (folders[0] / name).open("ab") as handle:
            handle.write(b" ")
        assert target_digest(str(folders[0]), CONFIG) != one
        one = target_digest(str(folders[0]), CONFIG)
    file = str(folders[2] / "model.safetensors")
    assert target_digest(file, CONFIG) != target_digest(str(folders[1] / "model.safetensors"), CONFIG)


def test_a_hub_id_is_known_by_its_commit() -> None:
    config = tiny_config("llama")
    config._commit_hash = "abc"
    assert target_digest("owner/model", config) == "owner/model@abc"


def test_a_draft_is_known_by_its_tensors() -> None:
    state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())}
    assert state_digest(state) == state_digest(dict(reversed(state.items())))
    for change in (
        {"a": torch.ones(3, 2, dtype=torch.bfloat16)},
        {"a": torch.ones(2, 3)},
        {"b": torch.tensor(-0.0)},
        {"c": torch.zeros(())},
    ):
        assert state_digest(state | change) != state_digest(state)
