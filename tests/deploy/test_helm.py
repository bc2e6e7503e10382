"""The Helm chart, rendered by Helm itself, against the schemas of Kubernetes and against the plain manifests."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.names import DEPLOY
from tests.deploy.test_kubernetes import NEWEST, OF_OPERATORS, OLDEST, one, pod, server

CHART = DEPLOY / "helm" / "darts-server"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
ALL: dict[str, Any] = {
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboard": True},
    "auth": {"adminApiKey": "other"},
}
"""All options that are off by default."""
MODEL = {
    "storageClass": "fast",
    "runtimeClassName": "nvidia",
    "vllmConfig": {"tensorParallelSize": 2, "extraArgs": ["--enable-lora"]},
    "dartsConfig": {"groupSize": 8},
}

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm for this machine")


@cache
def helm(*arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    assert HELM is not None
    return subprocess.run([HELM, *arguments], input=given, capture_output=True, text=True, timeout=240, check=False)


def values(model: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chart's values with changes to its first model and to other sections."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    found["auth"]["apiKey"] = "secret"
    found["servingEngineSpec"]["modelSpec"][0] |= model or {}
    for name, section in sections.items():
        found[name] |= section
    return found


def template(chosen: Mapping[str, Any]) -> "subprocess.CompletedProcess[str]":
    return helm("template", "roll", str(CHART), "--namespace", "rl", "--values", "-", given=json.dumps(chosen))


def rendered(model: Mapping[str, Any] | None = None, **sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    done = template(values(model, **sections))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def container(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    [servers] = of_kind(objects, "Deployment")
    [found] = servers["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_helm_lint_finds_no_error() -> None:
    done = helm("lint", "--strict", str(CHART), "--set", "auth.apiKey=secret")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("version", "everything"), [(OLDEST, True), (NEWEST, True), (NEWEST, False)])
def test_objects_are_valid_for_kubernetes(version: str, everything: bool) -> None:
    objects = rendered(MODEL, **ALL) if everything else rendered()
    checked = [each for each in objects if not each["apiVersion"].startswith(OF_OPERATORS)]
    assert len(checked) == (7 if everything else 6)
    assert len(objects) - len(checked) == (2 if everything else 0)
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


def test_deployment_and_pods_equal_those_of_the_plain_manifests() -> None:
    [servers] = of_kind(rendered(), "Deployment")
    for field in ("replicas", "strategy"):
        assert servers["spec"][field] == one("Deployment")["spec"][field]
    charts, plain = servers["spec"]["template"]["spec"], pod()
    of_chart, of_plain = container(rendered()), server()
    for field in ("securityContext", "enableServiceLinks", "terminationGracePeriodSeconds"):
        assert charts[field] == plain[field]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    for field in (*probes, "securityContext", "volumeMounts", "image", "ports", "resources"):
        assert of_chart[field] == of_plain[field], field
    assert set(of_chart["args"]) == set(of_plain["args"])


def test_a_model_is_one_pod_with_its_own_address_and_volumes() -> None:
    objects = rendered({"replicas": 3})
    [servers] = of_kind(objects, "Deployment")
    assert servers["spec"]["replicas"] == 1
    assert servers["spec"]["strategy"] == {"type": "Recreate"}
    volumes = servers["spec"]["template"]["spec"]["volumes"]
    claimed = {each["persistentVolumeClaim"]["claimName"] for each in volumes if "persistentVolumeClaim" in each}
    assert claimed == {each["metadata"]["name"] for each in of_kind(objects, "PersistentVolumeClaim")}
    assert len(claimed) == 2
    assert {each["name"] for each in volumes} == {each["name"] for each in container(objects)["volumeMounts"]}
    [service] = of_kind(objects, "Service")
    labels = servers["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], servers["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()


def test_the_pod_of_several_engines_has_ray_and_the_gpus_of_all() -> None:
    one, three = container(rendered()), container(rendered({"replicas": 3, "requestGPU": 2}))
    assert not [flag for flag in one["args"] if "replicas" in flag]
    assert "--replicas=3" in three["args"]
    assert {three["resources"][kind]["nvidia.com/gpu"] for kind in ("requests", "limits")} == {"6"}
    assert three["image"] == f"{one['image']}-ray"
    chosen = values({"replicas": 3}, servingEngineSpec={"tag": "mine"})
    [image] = [line for line in template(chosen).stdout.splitlines() if "image:" in line]
    assert image.strip() == 'image: "darts-server:mine"'


def test_two_models_share_no_objects() -> None:
    both = values()
    [first] = both["servingEngineSpec"]["modelSpec"]
    both["servingEngineSpec"]["modelSpec"].append(first | {"name": "small", "modelURL": "a/b"})
    objects = [document for document in yaml.safe_load_all(template(both).stdout) if document]
    selectors = [
        tuple(sorted(each["spec"]["selector"]["matchLabels"].items())) for each in of_kind(objects, "Deployment")
    ]
    assert len(selectors) == len(set(selectors)) == 2
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_metrics_are_scraped_once() -> None:
    objects = rendered(monitoring={"serviceMonitor": True})
    [monitor] = of_kind(objects, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    matching = [each for each in of_kind(objects, "Service") if wanted <= each["metadata"]["labels"].items()]
    assert len(matching) == 1
    assert monitor["spec"]["endpoints"][0]["port"] == matching[0]["spec"]["ports"][0]["name"]
    assert matching[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "darts-server"


def test_rules_and_dashboard_equal_those_of_the_other_folders() -> None:
    objects = rendered(**ALL)
    [rules] = of_kind(objects, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    [dashboard] = of_kind(objects, "ConfigMap")
    assert dashboard["data"]["darts.json"].strip() == (DEPLOY / "grafana/dashboards/darts.json").read_text().strip()


def test_flags_reach_the_server_and_a_given_secret_is_used() -> None:
    objects = rendered(MODEL, **ALL | {"auth": {"existingSecret": "mine", "apiKey": ""}})
    arguments = container(objects)["args"]
    assert arguments[0] == "Qwen/Qwen3-8B"
    assert {"--tensor-parallel-size=2", "--group-size=8", "--enable-lora"} <= set(arguments)
    assert not of_kind(objects, "Secret")
    sources = [each["valueFrom"]["secretKeyRef"] for each in container(objects)["env"]]
    assert {source["name"] for source in sources} == {"mine"}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (values(service={"prt": 1}), "prt"),
        (values({"replicaCount": 2}), "replicaCount"),
        (values({"replicas": 0}), "replicas"),
        (values({"dartsConfig": {"redundancy": 0.5}}), "redundancy"),
        (values({"name": "Not_A_Name"}), "name"),
        (values(auth={"apiKey": ""}), "auth.apiKey"),
    ],
)
def test_invalid_values_are_rejected_by_name(chosen: Mapping[str, Any], message: str) -> None:
    done = template(chosen)
    assert done.returncode != 0
    assert message in done.stderr
