"""Fixtures of a fake model and the updates of its weights, for tests of what offers these updates."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.serving.gate import Gate
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates
from tests.weights.model import FakeModel


@pytest.fixture
def model(tmp_path: Path) -> FakeModel:
    return FakeModel(tmp_path)


@pytest.fixture
def updates(model: FakeModel, tmp_path: Path) -> Iterator[Updates]:
    """Updates of `model`, with files under the test's folder."""
    with Staging(tmp_path) as staging:
        yield Updates(model, Gate(), staging, tmp_path)
