"""Targets and drafts are identified by content, independent of their paths."""

import os
from pathlib import Path

import pytest
import torch
from pairs import save_target, tiny_config

from longspec import digests
from longspec.digests import STRIDE_BYTES, file_digest
from longspec.models.content import state_digest, target_digest, target_digests

CONFIG = tiny_config("llama")


def test_a_target_is_known_by_its_weights_and_configs(tmp_path: Path) -> None:
    """Path and modification time do not count."""
    folders = [save_target(tmp_path / name, "llama", seed) for name, seed in (("one", 0), ("copy", 0), ("other", 1))]
    os.utime(folders[1] / "model.safetensors", (0, 0))
    one, copy, other = (target_digest(str(folder), CONFIG) for folder in folders)
    assert one == copy != other
    (folders[0] / "notes.txt").write_text("not part of the model")
    assert target_digest(str(folders[0]), CONFIG) == one
    shaping = ("special_tokens_map.json", "added_tokens.json", "generation_config.json", "tokenizer_config.json")
    for name in ("model.safetensors", *shaping):
        with (folders[0] / name).open("ab") as handle:
            handle.write(b" ")
        assert target_digest(str(folders[0]), CONFIG) != one
        one = target_digest(str(folders[0]), CONFIG)


def test_a_large_weight_file_is_sampled_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest covers the header, the end and a part of each MiB. Data files are read completely."""
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    weights = tmp_path / "model.safetensors"
    size = 4 * STRIDE_BYTES + 100
    weights.write_bytes(bytes(size))
    before = file_digest(str(weights))
    for changed in (0, STRIDE_BYTES - 1, 2 * STRIDE_BYTES + 5, size - 1):
        content = bytearray(size)
        content[changed] = 1
        weights.write_bytes(content)
        assert file_digest(str(weights)) != before
    assert file_digest(str(weights)) == file_digest(str(weights))


def test_a_hub_id_is_known_by_its_commit(tmp_path: Path) -> None:
    """So is a snapshot in the hub's cache."""
    config = tiny_config("llama")
    config._commit_hash = "abc"
    assert target_digest("owner/model", config) == "owner/model@abc"
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    assert target_digests(str(snapshot), config) == [[str(snapshot), "a" * 40]]


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
