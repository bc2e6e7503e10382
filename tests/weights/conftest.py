from pathlib import Path

import pytest

from tests.weights.harness import Harness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)
