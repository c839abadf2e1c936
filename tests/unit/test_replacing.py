"""Files and folders that others see whole or not at all."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from datasets import Dataset

from longspec.data.cache import DIGESTS, cached_table
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
