"""Fixtures of the web application."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def script() -> Any:
    """A `Script` in place of the scheduler."""
    from server_script import Script

    return Script()


@pytest.fixture
def client(script: Any) -> Iterator[Any]:
    """A client of the application over `script`."""
    from server_script import application
    from starlette.testclient import TestClient

    with TestClient(application(script)) as client:
        yield client
