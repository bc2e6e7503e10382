from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from darts_server.weights.updates import Updates
from tests.http.serving import client
from tests.weights.model import model, updates

__all__ = ["here", "model", "updates"]


@pytest.fixture
def here(updates: Updates) -> Iterator[TestClient]:
    """The server's routes, with weights that can be updated."""
    # One event loop for all requests, as in the server.
    with client(updates=updates) as caller, caller:
        yield caller
