"""The short forms of ``scripts/faults`` that no other test has: others are served meanwhile, and nothing is left."""

from pathlib import Path
from random import Random

import pytest

from darts_server.demo.server import Server
from faults.bodies import malformed
from faults.callers import half_open, slow_readers
from faults.case import Outcome, Scene
from faults.others import at_rest

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.mark.parametrize("fault", [slow_readers, half_open, malformed])
async def test_it_is_survived(server: Server, tmp_path: Path, fault: object) -> None:
    outcome: Outcome = await fault(Scene(tmp_path, quick=True, random=Random(1), server=server))  # type: ignore[operator]
    await at_rest(server, outcome)
    assert outcome.injected
    assert outcome.survived
    assert (outcome.wrong, outcome.lost) == ([], 0)
