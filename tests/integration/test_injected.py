"""Short forms of those faults of ``scripts/faults`` that no other test injects."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import pytest

from darts_server.demo.server import Server
from faults.bodies import broken_http
from faults.bystanders import check_idle
from faults.callers import half_open, slow_readers
from faults.case import Outcome, Scene

pytestmark = [pytest.mark.engine, pytest.mark.anyio]


@pytest.mark.parametrize("fault", [slow_readers, half_open, broken_http])
async def test_bystanders_are_served_and_the_server_gets_idle(
    server: Server, tmp_path: Path, fault: Callable[[Scene], Awaitable[Outcome]]
) -> None:
    outcome = await fault(Scene(tmp_path, quick=True, random=Random(1), server=server))
    await check_idle(server, outcome)
    assert outcome.injected
    assert outcome.survived
    assert (outcome.violations, outcome.lost) == ([], 0)
