"""A real server has the metrics that the dashboard and the alert rules name."""

import httpx
import pytest

from darts_server.offline.demo.server import Server
from tests.deploy.names import ours
from tests.deploy.recorded import exposed, recorded

pytestmark = pytest.mark.engine


def test_a_server_has_all_our_metrics_and_all_recorded_ones_of_vllm(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    shown = {metric.name: metric for metric in exposed(text)}
    assert [metric for metric in recorded() if shown.get(metric.name) != metric] == []
    types = {tuple(line.split()[2:4]) for line in text.splitlines() if line.startswith("# TYPE")}
    assert {(metric.name, metric.kind) for metric in ours()} <= types


def test_metrics_have_no_creation_times_and_no_unknown_values(server: Server) -> None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    assert [line for line in lines if "_created{" in line or line.endswith(" NaN")] == []


def test_the_log_says_once_where_a_ready_server_is_and_lists_no_routes(server: Server) -> None:
    lines = server.log.read_text().splitlines()
    [ready] = [line for line in lines if "darts-server is ready: " in line]
    assert f"{server.url} (page: {server.url}/darts/), model tiny, policy uniform" in ready
    assert [line for line in lines if "starting the engine for " in line] != []
    assert [line for line in lines if "Route: " in line] == []
