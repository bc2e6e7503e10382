"""Several servers kept by KubeRay, against the schemas of Kubernetes, the plain manifests and our own arguments."""

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from darts_server.ray.settings import GRACE_SECONDS, gpus_of, read_arguments
from darts_server.serving.lifecycle import END_SECONDS
from tests.deploy.names import DEPLOY, ROOT
from tests.deploy.test_dockerfiles import PROJECT, arguments
from tests.deploy.test_kuberay import documents
from tests.deploy.test_kubernetes import NEWEST, OLDEST, one, pod

SERVICE = yaml.safe_load((DEPLOY / "kuberay" / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
[WORKERS] = CLUSTER["workerGroupSpecs"]
GROUPS = [CLUSTER["headGroupSpec"], WORKERS]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pods_are_valid_for_kubernetes(version: str) -> None:
    for group in GROUPS:
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(made, version, strict=True)


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
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert application["import_path"] == "darts_server.ray:app"


def test_pods_live_until_their_servers_have_stopped() -> None:
    spec = read_arguments(SERVE["applications"][0]["args"])
    assert spec.server.grace > GRACE_SECONDS
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > spec.server.grace + END_SECONDS


def test_the_port_is_that_of_ray_serves_proxy() -> None:
    [container] = CLUSTER["headGroupSpec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": SERVE["http_options"]["port"]}]
    assert SERVE["http_options"]["host"] == "0.0.0.0"


def test_the_image_has_the_extra_with_this_version_of_ray() -> None:
    [needed] = [Requirement(text) for text in PROJECT["optional-dependencies"]["ray"]]
    assert needed.specifier.contains(CLUSTER["rayVersion"])
    assert needed.extras == {"serve"}
    assert arguments("Dockerfile")["EXTRAS"] == ""
    assert '.whl)${EXTRAS}"' in (ROOT / "Dockerfile").read_text()


def test_secrets_volumes_and_users_equal_those_of_the_plain_manifests() -> None:
    claims = {claim["metadata"]["name"] for claim in documents("storage.yaml")}
    for group in GROUPS:
        spec = group["template"]["spec"]
        assert spec["securityContext"] == pod()["securityContext"]
        [container] = spec["containers"]
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
        secret = one("Secret")
        assert {key["name"] for key in keys} == {secret["metadata"]["name"]}
        assert {key["key"] for key in keys} <= set(secret["stringData"])
        used = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        assert used <= claims
