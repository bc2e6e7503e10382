from pathlib import Path

import pytest

from tests.weights.house import House


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)
