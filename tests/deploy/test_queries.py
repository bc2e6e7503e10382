"""Whatever the dashboard and the alert rules ask for is there to be asked for."""

import json

import pytest
import yaml

from tests.deploy.names import DEPLOY, OF_TARGETS, ours
from tests.deploy.queries import filled_in, named, texts
from tests.deploy.recorded import recorded

DASHBOARD = DEPLOY / "grafana" / "dashboards" / "darts.json"
RULES = DEPLOY / "prometheus" / "rules.yaml"
OF_PROMETHEUS = {"up": {"job"}}


def dashboard() -> object:
    return json.loads(DASHBOARD.read_text())


def rules() -> list[dict[str, str]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def labels_by_sample() -> dict[str, set[str]]:
    """All names that a query may use, with the labels that each has."""
    known = {sample: {*metric.labels} for metric in [*ours(), *recorded()] for sample in metric.samples}
    for sample in [name for name in known if name.endswith("_bucket")]:
        known[sample].add("le")
    known |= {name: set[str]() for name in (rule.get("record", "") for rule in rules()) if name}
    return known | OF_PROMETHEUS


def expressions() -> list[str]:
    return [rule["expr"] for rule in rules()] + [filled_in(text) for text in texts(dashboard(), "expr")]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_promql_and_names_only_what_there_is(expression: str) -> None:
    known, found = labels_by_sample(), named(expression)
    assert found.selectors
    had = {"model_name", *OF_TARGETS}
    for name, labels in found.selectors:
        assert name in known, f"no metric is called {name}"
        assert labels <= known[name], f"{name} has no labels {labels - known[name]}"
        had |= known[name]
    assert found.groupings <= had


def test_no_name_is_taken_for_known_that_is_not() -> None:
    known = labels_by_sample()
    assert "darts_groups_total" in known
    assert "darts_groups" not in known
    assert known["darts_trajectory_length_tokens_bucket"] == {"kind", "le"}
    assert known["vllm:request_success_total"] == {"engine", "finished_reason"}
    assert [name for name, _ in named("sum(rate(no_such_total[5m])) / on () group_left max(other)").selectors] == [
        "no_such_total",
        "other",
    ]
    with pytest.raises(ValueError, match="unclosed"):
        named("sum(rate(x[5m])")
