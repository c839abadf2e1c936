"""A fixture of generations whose rounds may be launched ahead."""

import pytest


@pytest.fixture(params=[0, 1], ids=["waits", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are launched before the oldest one is read; captured rounds have 1."""
    from longspec.inference.engine.worker import Worker

    fixed = property(lambda worker: request.param, lambda worker, value: None)
    monkeypatch.setattr(Worker, "ahead", fixed, raising=False)
