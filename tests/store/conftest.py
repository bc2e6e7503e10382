from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.store import Store


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path if request.param == "file" else None) as store:
        yield store
