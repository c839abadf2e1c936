"""The target and the texts of the tests of training."""

from pathlib import Path

import pytest
from training_fixtures import make_target, write_texts


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `texts.jsonl` and `held_out.jsonl`."""
    work = tmp_path_factory.mktemp("work")
    make_target(work / "target")
    write_texts(work / "texts.jsonl")
    write_texts(work / "held_out.jsonl", seed=1)
    return work
