"""deploy/try-image with a stand-in for docker; for real it takes minutes and gigabytes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.deploy.names import DEPLOY
from tests.deploy.test_dockerfiles import last_stage, only

HEALTH = json.loads(only(last_stage("Dockerfile.cpu"), "HEALTHCHECK").partition("CMD ")[2])
DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
printf '%s\\037' "$@" >>calls; printf '\\036' >>calls
case "$1 $2" in
    "image inspect") printf 'CMD\\n'; cat health; echo ;;
    "inspect --format") cat code ;;
    exec*) [ "$4" != -c ] || [ "$(grep -ao exec calls | wc -l)" -gt 2 ] ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    """A docker whose containers become healthy at the third check."""
    for name, text in {"docker": DOCKER, "sleep": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "health").write_text("\n".join(HEALTH))
    (tmp_path / "code").write_text("0\n")
    return tmp_path


def try_image(docker: Path, *arguments: str, **environment: str) -> tuple[int, str, list[list[str]]]:
    """Return the exit code, the output and the calls of docker."""
    env = os.environ | {"PATH": f"{docker}:{os.environ['PATH']}", "ENGINE": "docker", **environment}
    done = subprocess.run([DEPLOY / "try-image", *arguments], env=env, capture_output=True, text=True, timeout=240)
    calls = (docker / "calls").read_text() if (docker / "calls").exists() else ""
    return done.returncode, done.stderr, [call.split("\037")[:-1] for call in calls.split("\036")[:-1]]


def test_it_builds_runs_as_a_user_without_a_name_checks_the_health_and_stops(docker: Path) -> None:
    code, output, calls = try_image(docker, "--build-arg", "TORCH_CPU_INDEX=https://mirror.example.com")
    assert code == 0, output
    assert "healthy after about 10 seconds" in output
    assert [call[0] for call in calls if call[0] not in ("exec", "inspect")] == [
        *("info", "--version", "build", "run", "image", "stop", "rm")
    ]
    build, run = (next(call for call in calls if call[0] == verb) for verb in ("build", "run"))
    assert build[1:] == [
        *("--file", "Dockerfile.cpu", "--tag", "darts-server:try"),
        *("--build-arg", "TORCH_CPU_INDEX=https://mirror.example.com", "."),
    ]
    assert run[run.index("--user") + 1] == "987654:0"
    assert [call[2:] for call in calls if call[0] == "exec"][:3] == [HEALTH] * 3


@pytest.mark.parametrize(
    ("exit_code", "environment", "said"),
    [("137", {}, "exit code 137"), ("0", {"TIMEOUT": "5", "RUN_AS": "5:0"}, "not healthy after 5 seconds")],
)
def test_a_server_that_is_not_in_order_fails_and_its_container_is_removed(
    docker: Path, exit_code: str, environment: dict[str, str], said: str
) -> None:
    (docker / "code").write_text(exit_code)
    code, output, calls = try_image(docker, **environment)
    assert (code, said in output, calls[-1][0]) == (1, True, "rm")
