"""The ingress as a deployment, behind Ray Serve's own proxy."""

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.ray.running import running
from tests.ray.test_cluster import answers, replicas, until

pytest.importorskip("ray")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
SERVE = str(Path(sys.executable).with_name("serve"))
REPLICAS = 3


def configuration(port: int, count: int) -> str:
    application = {
        "name": "small",
        "route_prefix": "/",
        "import_path": "tests.ray.small:app",
        "args": {
            "model": "m",
            "gpus": 0,
            "cpus": 0,
            "host": "127.0.0.1",
            "flags": "--allow-unauthenticated --grace-seconds 5",
        },
        "deployments": [{"name": "Server", "num_replicas": count}],
    }
    return yaml.safe_dump({"http_options": {"port": port}, "applications": [application]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def token() -> Iterator[None]:
    """A token of the cluster, which the command that deploys needs too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def url(folder: Path, token: None) -> Iterator[str]:
    def arguments(port: int) -> list[str]:
        (folder / "config.yaml").write_text(configuration(port, REPLICAS))
        return [SERVE, "run", str(folder / "config.yaml")]

    with running(arguments, folder / "log", signal.SIGINT) as address:
        until(lambda: len(replicas(address)) == REPLICAS)
        yield address


def test_requests_reach_all_servers_through_ray_serves_proxy(url: str) -> None:
    until(lambda: list(replicas(url).values()) == ["serving"] * REPLICAS)
    assert len(answers(url, 2 * REPLICAS)) == REPLICAS


def test_a_server_that_is_too_many_leaves_and_the_others_stay(url: str, folder: Path) -> None:
    before = answers(url, 2 * REPLICAS)
    port = int(url.rpartition(":")[2])
    (folder / "fewer.yaml").write_text(configuration(port, REPLICAS - 1))
    [dashboard] = re.findall(r"dashboard at \S*?(http://[0-9.:]+)", (folder / "log").read_text())
    command = [sys.executable, SERVE, "deploy", str(folder / "fewer.yaml"), "--address", dashboard]
    subprocess.run(command, check=True, timeout=300)
    until(lambda: len(replicas(url)) == REPLICAS - 1)
    time.sleep(1)
    assert answers(url, 2 * REPLICAS) < before
    assert httpx.get(f"{url}/health", verify=False).status_code == 200
