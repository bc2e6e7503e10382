import gc
from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from darts_server.weights.updates import Updates
from tests.http.serving import client
from tests.weights.model import model, updates

from .servers import listening

__all__ = ["model", "updates", "url"]


@pytest.fixture
def url(updates: Updates) -> Iterator[str]:
    """The server's own routes on a port, with weights that can be updated."""
    with client(updates=updates) as caller:
        assert isinstance(caller.app, FastAPI)
        with listening(caller.app) as listener:
            yield listener.url


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send requests again, and reconnect, at once."""
    monkeypatch.setattr("darts_client._requests.FIRST_DELAY", 0.0)


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Exempt imported objects from garbage collection. Each training collects once, which would take 0.6 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
