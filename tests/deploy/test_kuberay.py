"""The job for a model on several nodes, against the schemas of Kubernetes and the plain manifests."""

from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deploy.names import DEPLOY
from tests.deploy.test_kubernetes import NEWEST, OLDEST, one, pod

JOB, SERVICE = yaml.safe_load_all((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pods_and_service_are_valid_for_kubernetes(version: str) -> None:
    for group in GROUPS:
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(made, version, strict=True)
    kubernetes_validate.validate(SERVICE, version, strict=True)


def test_the_model_takes_all_gpus_of_all_pods() -> None:
    flags = dict(flag.removeprefix("--").split("=") for flag in JOB["spec"]["entrypoint"].split() if "=" in flag)
    pods = 1 + sum(group["replicas"] for group in CLUSTER["workerGroupSpecs"])
    gpus = {group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for group in GROUPS}
    assert gpus == {flags["tensor-parallel-size"]}
    assert pods == int(flags["pipeline-parallel-size"])
    assert flags["distributed-executor-backend"] == "ray"


def test_the_service_selects_the_pod_that_the_job_runs_in() -> None:
    [selected] = [
        g for g in GROUPS if SERVICE["spec"]["selector"].items() <= g["template"]["metadata"]["labels"].items()
    ]
    assert selected is CLUSTER["headGroupSpec"]
    [container] = selected["template"]["spec"]["containers"]
    assert container["ports"][0]["name"] == SERVICE["spec"]["ports"][0]["targetPort"]


def test_secrets_volumes_and_users_equal_those_of_the_plain_manifests() -> None:
    claims = {claim["metadata"]["name"] for claim in documents("storage.yaml")}
    for group in GROUPS:
        spec = group["template"]["spec"]
        assert spec["securityContext"] == pod()["securityContext"]
        [container] = spec["containers"]
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"]]
        secret = one("Secret")
        assert {key["name"] for key in keys} == {secret["metadata"]["name"]}
        assert {key["key"] for key in keys} <= set(secret["stringData"])
        used = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        assert used <= claims


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
