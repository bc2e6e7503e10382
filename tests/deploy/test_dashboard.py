"""The dashboard file of Grafana."""

import json
from itertools import combinations
from typing import Any

from tests.deploy.names import DEPLOY
from tests.deploy.queries import texts

GRAFANA = DEPLOY / "grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "darts.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def shown() -> list[dict[str, Any]]:
    return [panel for panel in PANELS if panel["type"] != "row"]


def test_data_source_model_and_server_are_selected_as_in_vllms_dashboards() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["DS_PROMETHEUS", "model_name", "instance"]
    assert variables["DS_PROMETHEUS"]["type"] == "datasource"
    assert variables["DS_PROMETHEUS"]["query"] == "prometheus"
    for panel in shown():
        assert panel["datasource"] == SOURCE
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE
            assert target["expr"].count("{") == target["expr"].count('model_name="$model_name", instance=~"$instance"')


def test_panels_have_unique_ids_places_and_descriptions() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    titles = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert len(set(titles)) == len(titles)
    assert all(panel["description"].endswith(".") for panel in shown())
    for one, other in combinations((panel["gridPos"] for panel in PANELS), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= WIDTH for panel in PANELS)


def test_counters_are_shown_as_rates() -> None:
    """The value of a counter itself depends on when the server was started."""
    for text in texts(DASHBOARD, "expr"):
        for piece in text.split("_total{")[:-1]:
            assert "rate(" in piece or "increase(" in piece or "darts_candidates" in text, text
