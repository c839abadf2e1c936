"""The target and the texts of the tests of training."""

from pathlib import Path

import pytest
from training_fixtures import make_work


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `texts.jsonl` and `held_out.jsonl`."""
    return make_work(tmp_path_factory.mktemp("work"))
