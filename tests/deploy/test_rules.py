"""The alert rules. ``rules.test.yaml`` tests them on time series, with Prometheus' own tool."""

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.deploy.names import DEPLOY, ROOT
from tests.deploy.test_pages import anchors

PROMETHEUS = DEPLOY / "prometheus"
OPERATIONS = ROOT / "docs" / "operations.md"


def load(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROMETHEUS / file).read_text())
    return loaded


def alerts() -> list[dict[str, Any]]:
    return [rule for group in load("rules.yaml")["groups"] for rule in group["rules"] if "alert" in rule]


def test_an_alert_has_a_severity_and_a_documented_meaning_and_remedy() -> None:
    headings = anchors(OPERATIONS)
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert ROOT / page == OPERATIONS
        assert anchor in headings, anchor
        assert f"`{alert['alert']}`" in OPERATIONS.read_text()


def test_every_rule_has_a_test() -> None:
    tested = (PROMETHEUS / "rules.test.yaml").read_text()
    assert [alert["alert"] for alert in alerts() if alert["alert"] not in tested] == []
    recorded = [rule["record"] for group in load("rules.yaml")["groups"] for rule in group["rules"] if "record" in rule]
    assert [name for name in recorded if f"expr: {name}" not in tested] == []


def test_prometheus_reads_the_rules_and_scrapes_the_server_that_compose_starts() -> None:
    config = load("prometheus.yaml")
    assert config["rule_files"] == ["rules.yaml"]
    [job] = config["scrape_configs"]
    assert [alert["expr"] for alert in alerts() if alert["alert"] == "DartsServerDown"] == [
        f'up{{job="{job["job_name"]}"}} == 0'
    ]
    [target] = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for server in (services["gpu"], services["cpu"]):
        assert server["networks"]["default"]["aliases"] == [name]
        assert server["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yaml"), ("check", "rules", "rules.yaml"), ("test", "rules", "rules.test.yaml")],
)
def test_promtool_finds_no_error(command: tuple[str, ...]) -> None:
    result = subprocess.run(["promtool", *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
