"""A real server has the metrics that the dashboard and the alert rules name."""

import httpx
import pytest

from darts_server.demo.server import Server
from tests.deploy.names import ours
from tests.deploy.recorded import exposed, recorded

pytestmark = pytest.mark.engine


def test_a_server_has_all_our_metrics_and_all_recorded_ones_of_vllm(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    shown = {metric.name: metric for metric in exposed(text)}
    assert [metric for metric in recorded() if shown.get(metric.name) != metric] == []
    types = {tuple(line.split()[2:4]) for line in text.splitlines() if line.startswith("# TYPE")}
    assert {(metric.name, metric.kind) for metric in ours()} <= types
