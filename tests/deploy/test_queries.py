"""The dashboard and the alert rules use only metrics and labels that exist."""

import json
from functools import cache

import pytest
import yaml

from tests.deploy.names import DEPLOY, TARGET_LABELS, ours
from tests.deploy.queries import parse_names, substitute_variables, texts
from tests.deploy.recorded import recorded

DASHBOARD = DEPLOY / "grafana" / "dashboards" / "darts.json"
RULES = DEPLOY / "prometheus" / "rules.yaml"
PROMETHEUS_METRICS = {"up": {"job"}}


def dashboard() -> object:
    return json.loads(DASHBOARD.read_text())


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@cache
def labels_by_sample() -> dict[str, set[str]]:
    """Return all names that a query may use, with the labels of each."""
    existing = {sample: {*metric.labels} for metric in [*ours(), *recorded()] for sample in metric.samples}
    for sample in [name for name in existing if name.endswith("_bucket")]:
        existing[sample].add("le")
    existing |= {name: set[str]() for name in (rule.get("record", "") for rule in rules()) if name}
    return existing | PROMETHEUS_METRICS


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [substitute_variables(text) for text in texts(dashboard(), "expr")]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_promql_and_names_only_existing_metrics(expression: str) -> None:
    existing, found = labels_by_sample(), parse_names(expression)
    assert found.selectors
    had = {"model_name", *TARGET_LABELS}
    for name, labels in found.selectors:
        assert name in existing, f"no metric is called {name}"
        assert labels <= existing[name], f"{name} has no labels {labels - existing[name]}"
        had |= existing[name]
    assert found.groupings <= had


def test_the_check_finds_names_that_do_not_exist() -> None:
    existing = labels_by_sample()
    assert "darts_groups_total" in existing
    assert "darts_groups" not in existing
    assert existing["darts_trajectory_length_tokens_bucket"] == {"kind", "le"}
    assert existing["vllm:request_success_total"] == {"engine", "finished_reason"}
    selectors = parse_names("sum(rate(no_such_total[5m])) / on () group_left max(other)").selectors
    assert [name for name, _ in selectors] == ["no_such_total", "other"]
    with pytest.raises(ValueError, match="unclosed"):
        parse_names("sum(rate(x[5m])")
