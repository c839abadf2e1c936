"""Files and folders that others see whole or not at all."""

import os
from pathlib import Path

import pytest

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
