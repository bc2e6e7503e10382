"""Five hundred mutated requests, and sequences of requests, in every push; `python -m faults.fuzz` sends many more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.demo.server import DARTS, Server
from faults.fuzz.fuzzer import Fuzzer
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
REQUESTS = 500


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on which single requests wait only shortly for others of their group."""
    waits = ("--group-wait", "0.2", "--group-name-wait", "1")
    with serve(DARTS, tmp_path_factory.mktemp("fuzz") / "log", "--enable-scale-out", *waits) as running:
        yield running


class SoleServer:
    """A server that must not be changed, and cannot be started again."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root = server, root

    def restart(self) -> None:
        raise RuntimeError(f"the server is no longer sound:\n{self.server.log_tail()}")


def test_whatever_callers_send_the_server_goes_on(server: Server, tmp_path: Path) -> None:
    with Fuzzer(SoleServer(server, tmp_path), tmp_path, changes=False) as fuzzer:
        tally = fuzzer.run(1, REQUESTS)
    assert tally.survived, "\n".join(map(str, tally.failures))
    assert tally.requests >= REQUESTS
    assert {"200", "400", "404"} <= {status for _, status in tally.answers}
