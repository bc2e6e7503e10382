"""The manifests, against the schemas of Kubernetes and against each other."""

from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from darts_server import settings
from darts_server.serving.lifecycle import END_SECONDS
from darts_server.settings.sources import flag_of
from tests.deploy.names import DEPLOY

FOLDER = DEPLOY / "kubernetes"
OLDEST, NEWEST = "1.29", "1.37"
OF_OPERATORS = ("monitoring.coreos.com/", "kustomize.config.k8s.io/")
"""A custom resource, for which Kubernetes has no schema."""
OUR_FLAGS = {flag_of(name) for name in settings.Settings.model_fields}


@cache
def objects() -> list[dict[str, Any]]:
    files = sorted(FOLDER.glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def one(kind: str) -> dict[str, Any]:
    [found] = [each for each in objects() if each["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = one("Deployment")["spec"]["template"]["spec"]
    return spec


def server() -> dict[str, Any]:
    [container] = pod()["containers"]
    found: dict[str, Any] = container
    return found


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_are_valid_for_kubernetes(version: str) -> None:
    checked = [each for each in objects() if not each["apiVersion"].startswith(OF_OPERATORS)]
    assert len(checked) == 6
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


def test_kustomize_includes_all_but_the_secret() -> None:
    listed = set(one("Kustomization")["resources"])
    assert listed == {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "secret.yaml"}


def test_all_selectors_match_the_labels_of_the_server() -> None:
    labels = one("Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "ServiceMonitor"):
        assert one(kind)["spec"]["selector"]["matchLabels"] == labels
    assert one("Service")["spec"]["selector"] == one("Service")["metadata"]["labels"] == labels


def test_probes_and_metrics_go_to_the_port_that_the_server_listens_on() -> None:
    [port] = server()["ports"]
    assert f"--port={port['containerPort']}" in server()["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server()[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    start = server()["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    [target] = one("Service")["spec"]["ports"]
    assert target["targetPort"] == port["name"]
    [endpoint] = one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == target["name"]


def test_running_groups_have_time_to_finish_before_the_pod_is_killed() -> None:
    [given] = [flag.partition("=")[2] for flag in server()["args"] if flag.startswith("--shutdown-timeout=")]
    assert int(given) + END_SECONDS == pod()["terminationGracePeriodSeconds"]


def test_volumes_exist_and_are_mounted_where_the_image_writes() -> None:
    mounted = {mount["name"]: mount["mountPath"] for mount in server()["volumeMounts"]}
    assert mounted == {"cache": "/cache", "state": "/state", "shm": "/dev/shm", "tmp": "/tmp"}
    assert {volume["name"] for volume in pod()["volumes"]} == set(mounted)
    claimed = {v["persistentVolumeClaim"]["claimName"] for v in pod()["volumes"] if "persistentVolumeClaim" in v}
    assert claimed == {each["metadata"]["name"] for each in objects() if each["kind"] == "PersistentVolumeClaim"}


def test_the_server_has_minimal_rights() -> None:
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsGroup"] == 0
    assert server()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_server_that_other_hosts_reach_has_a_key() -> None:
    """Otherwise it would not start."""
    assert "--host=0.0.0.0" in server()["args"]
    [key] = [variable for variable in server()["env"] if variable["name"] == "VLLM_API_KEY"]
    assert not key["valueFrom"]["secretKeyRef"].get("optional")


def test_keys_come_from_the_secret() -> None:
    secret = one("Secret")
    for variable in server()["env"]:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"]
    assert not [flag for flag in server()["args"] if "key" in flag]


def test_all_flags_of_the_server_exist() -> None:
    flags = {flag.partition("=")[0] for flag in server()["args"] if flag.startswith("--")}
    assert flags - OUR_FLAGS == {"--host", "--port", "--max-model-len", "--shutdown-timeout"}
