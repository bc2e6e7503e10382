"""A Ray cluster that runs already, with two nodes on this machine, and small servers in place of darts-servers."""

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.deploy.names import ROOT
from tests.ray.nodes import ADD, KILL
from tests.ray.running import running
from tests.ray.test_cluster import answers, replicas, until

pytest.importorskip("ray")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Nodes:
    """``change``: adds a node, or kills the one that was added last; returns how many there are."""

    address: str
    change: Callable[[str], int]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    # In its own folder: others that start a cluster at the same time would find this one.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name, value in (("TMPDIR", folder), ("AUTH_MODE", "token"), ("AUTH_TOKEN", secrets.token_hex(32))):
            patch.setenv(f"RAY_{name}", value)
        command = [sys.executable, "-m", "tests.ray.nodes"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            lines, output = process.stdin, process.stdout

            def change(what: str) -> int:
                print(what, file=lines, flush=True)
                return int(output.readline())

            yield Nodes(output.readline().strip(), change)
            lines.close()
            assert process.wait(120) == 0


def test_servers_are_on_all_nodes_and_a_node_that_is_lost_takes_its_server_alone(nodes: Nodes, tmp_path: Path) -> None:
    assert nodes.change(ADD) == 2

    def is_serving() -> bool:
        return list(replicas(url).values()) == ["serving"] * 2

    with running(lambda port: ["-m", "tests.ray.cluster", str(port), "2", nodes.address], tmp_path / "log") as url:
        until(is_serving)
        first = answers(url, 4)
        assert len(first) == 2
        assert nodes.change(KILL) == 1
        until(lambda: len(replicas(url)) == 1)
        [left] = answers(url, 4)
        assert left in first

        assert nodes.change(ADD) == 2
        until(is_serving)
        [new] = answers(url, 4) - {left}
        assert new not in first
    until(lambda: not any(map(psutil.pid_exists, (left, new))))
