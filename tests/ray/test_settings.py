import os
import subprocess
import sys
from pathlib import Path

import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.exceptions import InvalidSetting
from darts_server.ray.settings import Resources, gpus_of, prepare_cluster, read_application, read_arguments, value_of

NICENESS = "RAY_worker_niceness"


def test_serve_without_replicas_imports_no_ray() -> None:
    program = "import sys, darts_server.cli, darts_server.ray.settings; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_ray_installed_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("darts_server.cli.find_spec", lambda name: None)
    assert main(["serve", "model", "--replicas", "2"]) == USAGE_ERROR
    assert "pip install 'darts-server[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4", "-pp=2"], 8),
        (["--tensor_parallel_size=2", "--data-parallel-size", "2"], 4),
        (["--tensor-parallel-size", "many"], 1),
        (["-tp", "8", "-pp", "2", "--distributed-executor-backend", "ray"], 0),
        (["-tp", "8", "--distributed-executor-backend=mp"], 8),
    ],
)
def test_as_many_gpus_are_reserved_as_the_model_is_divided_over(flags: list[str], gpus: float) -> None:
    assert gpus_of(["model", *flags]) == gpus


def test_the_last_value_of_a_flag_counts() -> None:
    assert value_of(["--a=1", "--b", "2", "--a", "3"], "--a") == "3"
    assert value_of(["--a", "1", "--a="], "--a") == ""
    assert value_of(["--a"], "--a") == ""
    assert value_of(["--ab", "1"], "--a") is None


def test_each_replica_has_a_state_folder_of_its_own(tmp_path: Path) -> None:
    spec = read_application(["m", "--state-dir", str(tmp_path)], 2, None, Resources())
    assert spec.server.arguments_of(1)[-2:] == ["--state-dir", f"{tmp_path}/replica-1"]
    assert read_application(["m"], 2, None, Resources()).server.arguments_of(1) == ["m"]


def test_the_state_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DARTS_STATE_DIR", str(tmp_path))
    spec = read_application(["m"], 2, None, Resources())
    assert spec.server.arguments_of(0) == ["m", "--state-dir", f"{tmp_path}/replica-0"]


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ([], 30.0),
        (["--grace-seconds", "5", "--shutdown-timeout", "9"], 5.0),
        (["--shutdown-timeout", "9"], 9.0),
        (["--shutdown-timeout", "0"], 30.0),
        (["--shutdown-timeout", "x"], 30.0),
    ],
)
def test_a_replica_waits_for_running_requests_as_long_as_its_server(flags: list[str], seconds: float) -> None:
    assert read_application(["m", *flags], 2, None, Resources()).server.grace == seconds


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--uds", "/tmp/socket"], "--uds"),
        (["--ssl-keyfile=key"], "proxy with TLS"),
        (["--redundancy", "many"], "--redundancy"),
    ],
)
def test_flags_that_replicas_cannot_have_are_refused_before_anything_starts(flags: list[str], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        read_application(["m", *flags], 2, None, Resources())


def test_a_file_of_flags_needs_the_number_of_gpus() -> None:
    with pytest.raises(InvalidSetting, match="--gpus-per-replica"):
        read_application(["m", "--config", "flags.yaml"], 2, None, Resources())
    assert read_application(["m", "--config=flags.yaml"], 2, None, Resources(2.0)).server.resources.gpus == 2.0


def test_the_model_comes_first() -> None:
    with pytest.raises(InvalidSetting, match="serve MODEL --replicas N"):
        read_application(["--max-model-len", "9", "m"], 2, None, Resources())


def test_arguments_of_an_application_are_those_of_serve() -> None:
    given = {"model": "m", "replicas": 3, "flags": "--policy off --served-model-name 'a b'", "gpus": 0.5, "cpus": "2"}
    spec = read_arguments(given)
    assert spec.server.arguments == ["m", "--policy", "off", "--served-model-name", "a b"]
    assert (spec.replicas, spec.server.resources, spec.server.host) == (3, Resources(0.5, 2.0), None)
    assert read_arguments({"model": "m", "host": "127.0.0.1"}).server.host == "127.0.0.1"
    assert read_arguments({"model": "m"}).server.resources == Resources(None, 1.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "model=Qwen"),
        ({"model": "m", "replica": "2"}, "has no argument replica"),
        ({"model": "m", "replicas": "0"}, "replicas"),
        ({"model": "m", "replicas": 1.5}, "replicas"),
        ({"model": "m", "gpus": "-1"}, "gpus"),
        ({"model": "m", "cpus": "nan"}, "cpus"),
    ],
)
def test_a_wrong_argument_of_an_application_is_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidSetting, match=named):
        read_arguments(given)


def test_a_cluster_that_is_started_here_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv(NICENESS, "5")
    prepare_cluster()
    assert os.environ[NICENESS] == "5"
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    prepare_cluster()
    assert os.environ["RAY_AUTH_TOKEN"] == "mine"
