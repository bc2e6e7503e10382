"""A real server has the metrics that the dashboard and the alert rules name."""

import httpx
import pytest

from darts_server.demo.server import Server
from tests.deploy.names import ours
from tests.deploy.recorded import exposed, recorded

pytestmark = pytest.mark.engine


def test_a_server_has_all_recorded_metrics_of_vllm(server: Server) -> None:
    shown = {metric.name: metric for metric in exposed(httpx.get(f"{server.url}/metrics").text)}
    assert [metric for metric in recorded() if shown.get(metric.name) != metric] == []


def test_a_server_has_all_our_metrics(server: Server) -> None:
    lines = (line.split() for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line.startswith("# TYPE"))
    shown = {(name, kind) for _, _, name, kind in lines}
    assert {(metric.name, metric.kind) for metric in ours()} <= shown
