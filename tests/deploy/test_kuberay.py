"""KubeRay's job for a model on several nodes, and its service that keeps several servers.

Against the schemas of Kubernetes, the plain manifests and our own arguments.
"""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from darts_server.ray.settings import GRACE_SECONDS, gpus_of, read_arguments
from darts_server.serving.lifecycle import END_SECONDS
from tests.deploy.names import DEPLOY, ROOT
from tests.deploy.test_dockerfiles import PROJECT, arguments
from tests.deploy.test_kubernetes import NEWEST, OLDEST, objects, one, pod

FOLDER = DEPLOY / "kuberay"
JOB, JOBS_SERVICE = yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text())
SERVICE = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
OF_JOB, OF_SERVICE = JOB["spec"]["rayClusterSpec"], SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
[WORKERS] = OF_SERVICE["workerGroupSpecs"]


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pods_and_service_are_valid_for_kubernetes(version: str) -> None:
    for group in groups(OF_JOB) + groups(OF_SERVICE):
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(made, version, strict=True)
    kubernetes_validate.validate(JOBS_SERVICE, version, strict=True)


def test_the_model_takes_all_gpus_of_all_pods() -> None:
    flags = dict(flag.removeprefix("--").split("=") for flag in JOB["spec"]["entrypoint"].split() if "=" in flag)
    pods = 1 + sum(group["replicas"] for group in OF_JOB["workerGroupSpecs"])
    containers = [group["template"]["spec"]["containers"][0] for group in groups(OF_JOB)]
    assert {each["resources"]["limits"]["nvidia.com/gpu"] for each in containers} == {flags["tensor-parallel-size"]}
    assert pods == int(flags["pipeline-parallel-size"])
    assert flags["distributed-executor-backend"] == "ray"


def test_the_service_selects_the_pod_that_the_job_runs_in() -> None:
    wanted = JOBS_SERVICE["spec"]["selector"].items()
    [selected] = [group for group in groups(OF_JOB) if wanted <= group["template"]["metadata"]["labels"].items()]
    assert selected is OF_JOB["headGroupSpec"]
    [container] = selected["template"]["spec"]["containers"]
    assert container["ports"][0]["name"] == JOBS_SERVICE["spec"]["ports"][0]["targetPort"]


@pytest.mark.parametrize("cluster", [OF_JOB, OF_SERVICE], ids=["job", "service"])
def test_secrets_volumes_and_users_equal_those_of_the_plain_manifests(cluster: dict[str, Any]) -> None:
    claims = {each["metadata"]["name"] for each in objects() if each["kind"] == "PersistentVolumeClaim"}
    secret = one("Secret")
    for group in groups(cluster):
        spec = group["template"]["spec"]
        assert spec["securityContext"] == pod()["securityContext"]
        [container] = spec["containers"]
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
        assert {key["name"] for key in keys} == {secret["metadata"]["name"]}
        assert {key["key"] for key in keys} <= set(secret["stringData"])
        used = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        assert used <= claims


def test_the_workers_have_room_for_all_servers_and_for_nothing_else() -> None:
    [application] = SERVE["applications"]
    spec = read_arguments(application["args"])
    [container] = WORKERS["template"]["spec"]["containers"]
    assert spec.server.resources.gpus == gpus_of(spec.server.arguments)
    assert spec.server.resources.gpus == float(container["resources"]["limits"]["nvidia.com/gpu"])
    assert spec.server.resources.cpus <= float(container["resources"]["requests"]["cpu"])
    [servers] = application["deployments"]
    assert WORKERS["replicas"] == WORKERS["minReplicas"] == WORKERS["maxReplicas"] == servers["num_replicas"]
    assert servers["name"] == "Server"
    assert "replicas" not in application["args"], "a change of it would restart all servers"
    assert OF_SERVICE["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert application["import_path"] == "darts_server.ray:app"


def test_pods_live_until_their_servers_have_stopped() -> None:
    spec = read_arguments(SERVE["applications"][0]["args"])
    assert spec.server.grace > GRACE_SECONDS
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > spec.server.grace + END_SECONDS


def test_the_port_is_that_of_ray_serves_proxy() -> None:
    [container] = OF_SERVICE["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": SERVE["http_options"]["port"]}]
    assert SERVE["http_options"]["host"] == "0.0.0.0"


def test_the_image_has_the_extra_with_this_version_of_ray() -> None:
    [needed] = [Requirement(text) for text in PROJECT["optional-dependencies"]["ray"]]
    assert needed.specifier.contains(OF_SERVICE["rayVersion"])
    assert needed.extras == {"serve"}
    assert arguments("Dockerfile")["EXTRAS"] == ""
    assert '.whl)${EXTRAS}"' in (ROOT / "Dockerfile").read_text()
