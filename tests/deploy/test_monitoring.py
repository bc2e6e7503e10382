"""The dashboard of Grafana, the alert rules of Prometheus and the page of metrics, against the metrics that exist.

``rules.test.yaml`` tests the rules on time series, with Prometheus' own tool.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.names import DEPLOY, ROOT, TARGET_LABELS, ours
from tests.deploy.recorded import recorded
from tests.deploy.table import PAGE, page
from tests.deploy.test_pages import anchors

PROMETHEUS = DEPLOY / "prometheus"
OPERATIONS = ROOT / "docs" / "operations.md"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "darts.json").read_text())
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$model_name": "m", "$instance": ".*"}
"""Variables of Grafana and of our dashboard, with an example value each."""
PROMETHEUS_METRICS = {"up": {"job"}}


def load(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((PROMETHEUS / file).read_text())
    return loaded


RULES: list[dict[str, Any]] = [rule for group in load("rules.yaml")["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = [rule["record"] for rule in RULES if "record" in rule]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Return all expressions of the dashboard."""
    asking = [*DASHBOARD["annotations"]["list"], *(target for panel in panels() for target in panel["targets"])]
    return [each["expr"] for each in asking if "expr" in each]


# --- metrics ----------------------------------------------------------------


def test_the_page_of_metrics_is_up_to_date() -> None:
    assert PAGE.read_text() == page(ours()), "run scripts/metrics"


def test_metric_names_follow_the_conventions_of_prometheus() -> None:
    for metric in ours():
        assert metric.name.startswith("darts_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.name.endswith(("_bucket", "_sum", "_count", "_created", "_ms", "_milliseconds"))
        assert metric.text.endswith(".")
        assert not {"le", "quantile", "job", "instance"} & set(metric.labels)


# --- expressions ------------------------------------------------------------


@cache
def labels_by_sample() -> dict[str, set[str]]:
    """Return all names that a query may use, with the labels of each."""
    existing = {sample: {*metric.labels} for metric in [*ours(), *recorded()] for sample in metric.samples}
    for sample in [name for name in existing if name.endswith("_bucket")]:
        existing[sample].add("le")
    return existing | {name: set[str]() for name in RECORDED} | PROMETHEUS_METRICS


def expressions() -> Iterator[str]:
    """Yield all expressions, those of the dashboard as Grafana would send them."""
    yield from (rule["expr"] for rule in RULES)
    for expression in queries():
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        yield expression


def parse_names(expression: str) -> tuple[list[tuple[str, set[str]]], set[str]]:
    """Return the names of time series with the labels that select them, and all labels that are grouped by.

    Raises:
        ValueError: it is not PromQL.
    """
    selectors: list[tuple[str, set[str]]] = []
    groupings = set[str]()

    def visit(node: promql_parser.Expr) -> None:
        match node:
            case promql_parser.VectorSelector():
                labels = {matcher.name for matcher in node.matchers.matchers}
                selectors.append((node.name or "", labels - TARGET_LABELS - {"model_name"}))
            case promql_parser.AggregateExpr() if node.modifier is not None:
                groupings.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return selectors, groupings


@pytest.mark.parametrize("expression", [*expressions()])
def test_an_expression_is_promql_and_names_only_existing_metrics(expression: str) -> None:
    assert "$" not in expression, "unknown variable"
    existing, (selectors, groupings) = labels_by_sample(), parse_names(expression)
    assert selectors
    had = {"model_name", *TARGET_LABELS}
    for name, labels in selectors:
        assert name in existing, f"no metric is called {name}"
        assert labels <= existing[name], f"{name} has no labels {labels - existing[name]}"
        had |= existing[name]
    assert groupings <= had


# --- dashboard --------------------------------------------------------------


def test_data_source_model_and_server_are_selected_as_in_vllms_dashboards() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["DS_PROMETHEUS", "model_name", "instance"]
    assert variables["DS_PROMETHEUS"]["query"] == "prometheus"
    assert all(each["datasource"] == SOURCE for panel in panels() for each in (panel, *panel["targets"]))
    for expression in queries():
        assert expression.count("{") == expression.count('model_name="$model_name", instance=~"$instance"')


def test_panels_have_unique_ids_and_descriptions() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"].endswith(".") for panel in panels())


def test_counters_are_shown_as_rates() -> None:
    """The value of a counter itself depends on when the server was started."""
    for expression in queries():
        for piece in expression.split("_total{")[:-1]:
            assert re.search(r"rate\(|increase\(|darts_candidates", piece), expression


# --- rules ------------------------------------------------------------------


def test_an_alert_has_a_severity_and_a_documented_meaning_and_remedy() -> None:
    headings = anchors(OPERATIONS)
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        path, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert ROOT / path == OPERATIONS
        assert anchor in headings, anchor
        assert f"`{alert['alert']}`" in OPERATIONS.read_text()


def test_every_rule_has_a_test() -> None:
    tested = (PROMETHEUS / "rules.test.yaml").read_text()
    assert [alert["alert"] for alert in ALERTS if alert["alert"] not in tested] == []
    assert [name for name in RECORDED if f"expr: {name}" not in tested] == []


def test_prometheus_reads_the_rules_and_scrapes_the_server_that_compose_starts() -> None:
    config = load("prometheus.yaml")
    assert config["rule_files"] == ["rules.yaml"]
    [job] = config["scrape_configs"]
    [down] = [alert["expr"] for alert in ALERTS if alert["alert"] == "DartsServerDown"]
    assert down == f'up{{job="{job["job_name"]}"}} == 0'
    [target] = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for server in (services["gpu"], services["cpu"]):
        assert server["networks"]["default"]["aliases"] == [name]
        assert server["ports"] == [f"127.0.0.1:{port}:{port}"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Prometheus, is not installed")
@pytest.mark.parametrize(
    "command", ["check config prometheus.yaml", "check rules rules.yaml", "test rules rules.test.yaml"]
)
def test_promtool_finds_no_error(command: str) -> None:
    result = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
