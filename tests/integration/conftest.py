"""Fixtures of generations, whose rounds may be launched ahead, and of the console's commands."""

from pathlib import Path

import pytest
from http_server import chat_tokenizer
from pairs import make_pair, save_target
from tiny_tokenizer import VOCAB_SIZE

from longspec.models.glide import GlideMixin


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that speaks bytes, with a chat template and no draft."""
    target = save_target(tmp_path_factory.mktemp("console"), "llama", vocab_size=VOCAB_SIZE, initializer_range=0.1)
    chat_tokenizer().save_pretrained(target)
    return target


@pytest.fixture
def model(tmp_path: Path) -> GlideMixin:
    """A random pair for one test, which may change it."""
    return make_pair(tmp_path)


@pytest.fixture(params=[0, 1], ids=["waits", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are launched before the oldest one is read; captured rounds have 1."""
    from longspec.inference.engine.worker import Worker

    fixed = property(lambda worker: request.param, lambda worker, value: None)
    monkeypatch.setattr(Worker, "ahead", fixed, raising=False)
