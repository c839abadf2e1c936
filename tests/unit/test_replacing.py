"""Files and folders: seen whole or not at all; targets and drafts are identified by content."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from datasets import Dataset
from pairs import save_target, tiny_config

from longspec import digests
from longspec.data.cache import DIGESTS, cached_table
from longspec.digests import STRIDE_BYTES, file_digest
from longspec.models.content import state_digest, target_digest, target_digests
from longspec.replacing import replacing


@pytest.mark.parametrize("folder", [False, True])
def test_an_error_leaves_what_was_there_and_nothing_else(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "path"
    if not folder:
        path.write_text("old")
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="half"), replacing(path, folder) as unfinished:
        (unfinished / "file" if folder else unfinished).write_text("new")
        assert {file.name: file.read_text() for file in tmp_path.iterdir() if file != unfinished} == before
        raise ValueError("half")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_what_a_killed_process_left_does_not_join_a_folder(tmp_path: Path) -> None:
    with replacing(tmp_path / "other", folder=True) as unfinished:
        left = unfinished.with_name(unfinished.name.replace("other", "path"))
    left.mkdir()
    (left / "old").touch()
    with replacing(tmp_path / "path", folder=True) as unfinished:
        (unfinished / "new").touch()
    assert [file.name for file in (tmp_path / "path").iterdir()] == ["new"] and not left.exists()


def test_a_link_is_replaced_and_a_pipe_is_written(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with replacing(tmp_path / "link") as unfinished:
        unfinished.write_text("new")
    assert (tmp_path / "target").read_text() == "old" and (tmp_path / "link").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe") as unfinished:
        unfinished.write_text("new")
    assert os.read(reader, 9) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_one_of_several_builders_builds(tmp_path):
    """The others wait for its table, even if all of them found a damaged one."""
    folder, built, together = tmp_path / "table", [], Barrier(3)
    cached_table(folder, lambda inner: write_table(inner, 1))
    (folder / DIGESTS).write_text("{}")

    def build(into):
        built.append(into)
        write_table(into, 2)

    def run(_):
        together.wait()
        return cached_table(folder, build)["n"][:]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [[2]] * 3
    assert len(built) == 1 and sorted(path.name for path in tmp_path.iterdir()) == [".table.lock", "table"]


def write_table(folder, number):
    Dataset.from_dict({"n": [number]}).map(cache_file_name=f"{folder}/a.arrow")


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


def test_a_hub_id_is_known_by_its_commit_and_a_draft_by_its_tensors(tmp_path: Path) -> None:
    """So is a snapshot in the hub's cache."""
    config = tiny_config("llama")
    config._commit_hash = "abc"
    assert target_digest("owner/model", config) == "owner/model@abc"
    snapshot = tmp_path / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    assert target_digests(str(snapshot), config) == [[str(snapshot), "a" * 40]]
    state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())}
    assert state_digest(state) == state_digest(dict(reversed(state.items())))
    for change in (
        {"a": torch.ones(3, 2, dtype=torch.bfloat16)},
        {"a": torch.ones(2, 3)},
        {"b": torch.tensor(-0.0)},
        {"c": torch.zeros(())},
    ):
        assert state_digest(state | change) != state_digest(state)
