"""KubeRay's jobs: a model on several nodes, and a server with engines on several nodes.

Against the schemas of Kubernetes, the plain manifests and our own flags.
"""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from darts_server.serving.lifecycle import END_SECONDS
from tests.deploy.names import DEPLOY, ROOT
from tests.deploy.test_dockerfiles import PROJECT, arguments
from tests.deploy.test_kubernetes import NEWEST, OLDEST, OUR_FLAGS, objects, one, pod, server

FOLDER = DEPLOY / "kuberay"
Manifest = tuple[dict[str, Any], dict[str, Any]]
OF_VLLM = {"--host", "--port", "--max-model-len", "--shutdown-timeout", "--distributed-executor-backend"}
OF_VLLM |= {"--tensor-parallel-size", "--pipeline-parallel-size"}


def read(file: str) -> Manifest:
    job, service = yaml.safe_load_all((FOLDER / file).read_text())
    return job, service


DIVIDED, REPLICAS = read("rayjob.yaml"), read("replicas.yaml")

each_job = pytest.mark.parametrize("manifest", [DIVIDED, REPLICAS], ids=["divided", "replicas"])


def cluster(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = manifest[0]["spec"]["rayClusterSpec"]
    return found


def flags(manifest: Manifest) -> dict[str, str]:
    words = manifest[0]["spec"]["entrypoint"].split()
    return dict(word.split("=") for word in words if word.startswith("--"))


def groups(manifest: Manifest) -> list[dict[str, Any]]:
    return [cluster(manifest)["headGroupSpec"], *cluster(manifest)["workerGroupSpecs"]]


def pods(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the specification of each pod that runs."""
    return [group["template"]["spec"] for group in groups(manifest) for _ in range(group.get("replicas", 1))]


def gpus(manifest: Manifest) -> list[int]:
    return [int(each["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) for each in pods(manifest)]


@each_job
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_pods_and_service_are_valid_for_kubernetes(version: str, manifest: Manifest) -> None:
    for group in groups(manifest):
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        kubernetes_validate.validate(made, version, strict=True)
    kubernetes_validate.validate(manifest[1], version, strict=True)


@each_job
def test_all_flags_of_the_server_exist(manifest: Manifest) -> None:
    assert flags(manifest).keys() <= OUR_FLAGS | OF_VLLM
    assert manifest[0]["spec"]["entrypoint"].startswith("darts-server serve Qwen/")


def test_a_model_that_is_divided_takes_all_gpus_of_all_pods() -> None:
    assert {str(each) for each in gpus(DIVIDED)} == {flags(DIVIDED)["--tensor-parallel-size"]}
    assert len(pods(DIVIDED)) == int(flags(DIVIDED)["--pipeline-parallel-size"])
    assert flags(DIVIDED)["--distributed-executor-backend"] == "ray"


def test_each_gpu_has_an_engine_and_its_pod_the_cpus_of_all() -> None:
    assert sum(gpus(REPLICAS)) == int(flags(REPLICAS)["--replicas"])
    assert flags(REPLICAS)["--ray-address"] == "auto"
    assert len(pods(REPLICAS)) > 1
    for spec, engines in zip(pods(REPLICAS), gpus(REPLICAS), strict=True):
        cpus = float(spec["containers"][0]["resources"]["requests"]["cpu"])
        assert engines < cpus, "Ray reserves a CPU for each engine"


@each_job
def test_the_service_selects_the_pod_that_the_job_runs_in(manifest: Manifest) -> None:
    job, service = manifest
    wanted = service["spec"]["selector"].items()
    [selected] = [group for group in groups(manifest) if wanted <= group["template"]["metadata"]["labels"].items()]
    assert selected is cluster(manifest)["headGroupSpec"]
    [container] = selected["template"]["spec"]["containers"]
    [target] = service["spec"]["ports"]
    assert container["ports"] == [{"name": target["targetPort"], "containerPort": int(flags(manifest)["--port"])}]
    assert flags(manifest)["--host"] == "0.0.0.0"
    assert job["metadata"]["name"] == service["metadata"]["name"]


def test_services_of_both_jobs_select_different_pods() -> None:
    selectors = [manifest[1]["spec"]["selector"] for manifest in (DIVIDED, REPLICAS)]
    assert selectors[0] != selectors[1]
    assert one("Service")["spec"]["selector"] != selectors[1]


@each_job
def test_secrets_volumes_and_users_equal_those_of_the_plain_manifests(manifest: Manifest) -> None:
    claims = {each["metadata"]["name"] for each in objects() if each["kind"] == "PersistentVolumeClaim"}
    secret = one("Secret")
    for spec in pods(manifest):
        assert spec["securityContext"] == pod()["securityContext"]
        [container] = spec["containers"]
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each]
        assert {key["name"] for key in keys} == {secret["metadata"]["name"]}
        assert {key["key"] for key in keys} <= set(secret["stringData"])
        used = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
        assert used <= claims
        assert {each["name"] for each in spec["volumes"]} == {each["name"] for each in container["volumeMounts"]}


def test_no_engine_has_a_key_in_its_environment() -> None:
    """Engines have the environment of their pod's container."""
    head, *workers = pods(REPLICAS)
    for spec in (head, *workers):
        assert {each["name"] for each in spec["containers"][0]["env"]} == {"HF_TOKEN", "RAY_worker_niceness"}
    assert not [volume for spec in workers for volume in spec["volumes"] if "secret" in volume]
    [keys] = [volume for volume in head["volumes"] if "secret" in volume]
    [mount] = [each for each in head["containers"][0]["volumeMounts"] if each["name"] == keys["name"]]
    files = {f"{mount['mountPath']}/{item['path']}" for item in keys["secret"]["items"]}
    assert files == {flags(REPLICAS)["--api-key-file"], flags(REPLICAS)["--admin-api-key-file"]}
    assert keys["secret"]["secretName"] == one("Secret")["metadata"]["name"]
    assert {item["key"] for item in keys["secret"]["items"]} <= set(one("Secret")["stringData"])


@each_job
def test_the_head_lives_until_its_server_has_stopped(manifest: Manifest) -> None:
    grace = int(flags(manifest)["--shutdown-timeout"])
    assert pods(manifest)[0]["terminationGracePeriodSeconds"] >= grace + END_SECONDS


@each_job
def test_the_image_has_the_extra_with_this_version_of_ray(manifest: Manifest) -> None:
    [needed] = [Requirement(text) for text in PROJECT["optional-dependencies"]["ray"]]
    assert needed.specifier.contains(cluster(manifest)["rayVersion"])
    assert {spec["containers"][0]["image"] for spec in pods(manifest)} == {f"{server()['image']}-ray"}
    assert needed.extras == {"default"}, "a RayJob needs the job server of Ray's dashboard"
    assert arguments("Dockerfile")["EXTRAS"] == ""
    assert '.whl)${EXTRAS}"' in (ROOT / "Dockerfile").read_text()
