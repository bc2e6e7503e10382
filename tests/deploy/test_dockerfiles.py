"""The Dockerfiles, checked against the tree; no image is built."""

import json
import os
import re
import subprocess
import tomllib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from darts_server.settings import Settings
from darts_server.vllm.compat import TESTED_SERIES
from tests.deploy.names import DEPLOY, ROOT

FILES = ("Dockerfile", "Dockerfile.cpu")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
Step = tuple[str, str]

every_file = pytest.mark.parametrize("file", FILES)


def steps(file: str) -> list[Step]:
    """Return instructions and their values in order."""
    parsed = DockerfileParser(fileobj=BytesIO((ROOT / file).read_bytes())).structure
    return [(step["instruction"], step["value"]) for step in parsed if step["instruction"] != "COMMENT"]


def last_stage(file: str) -> list[Step]:
    everything = steps(file)
    start = max(number for number, (instruction, _) in enumerate(everything) if instruction == "FROM")
    return everything[start:]


def only(found: list[Step], instruction: str) -> str:
    [value] = [value for name, value in found if name == instruction]
    return value


def arguments(file: str) -> dict[str, str]:
    """Build arguments with a default."""
    return dict(value.split("=", 1) for name, value in steps(file) if name == "ARG" and "=" in value)


def environment(file: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for name, value in last_stage(file) if name == "ENV" for pair in value.split())


@pytest.mark.parametrize(("file", "build"), [("Dockerfile", "gpu"), ("Dockerfile.cpu", "cpu")])
def test_the_image_has_the_version_of_vllm_that_setup_installs(file: str, build: str) -> None:
    version = arguments(file)["VLLM_VERSION"]
    [needed] = [Requirement(text) for text in PROJECT["optional-dependencies"][build]]
    assert needed.specifier.contains(version)
    assert version.startswith(tuple(f"{series}." for series in TESTED_SERIES))
    # Which of them scripts/setup installs by default, so that the image has what CI runs.
    assert f"VLLM_VERSION=${{DARTS_VLLM_VERSION:-{version}}}\n" in (ROOT / "scripts/setup").read_text()


def test_the_cpu_image_has_the_torch_that_setup_installs() -> None:
    version = arguments("Dockerfile.cpu")["TORCH_VERSION"]
    assert f"TORCH_VERSION={version}\n" in (ROOT / "scripts/setup").read_text()


@every_file
def test_base_images_are_pinned_and_can_be_replaced(file: str) -> None:
    given = arguments(file)
    for instruction, value in steps(file):
        if instruction == "FROM":
            name = re.fullmatch(r"\$\{(\w+)\}( AS \w+)?", value)
            assert name, value
            image, _, tag = given[name[1]].partition(":")
            assert image
            assert re.search(r"\d+\.\d+|VLLM_VERSION", tag), value


@every_file
def test_it_runs_as_any_user_of_group_0(file: str) -> None:
    found = last_stage(file)
    assert only(found, "USER") == "2000:0"
    written = [value for name, value in found if name == "RUN" and "chgrp 0 /cache /state" in value]
    assert len(written) == 1
    assert "chmod 2770 /cache /state" in written[0]
    assert environment(file)["HOME"] == "/cache"
    assert {"USER", "LOGNAME"} <= set(environment(file))
    assert environment(file)["DARTS_STATE_DIR"] == "/state"
    after = found[[name for name, _ in found].index("USER") :]
    assert not {"RUN", "COPY", "ADD"} & {name for name, _ in after}


@every_file
def test_it_passes_arguments_to_serve_and_its_folders_are_writable_by_the_group(file: str, tmp_path: Path) -> None:
    server = tmp_path / "darts-server"
    server.write_text('#!/bin/sh\numask\necho "$@"\n')
    server.chmod(0o755)
    entry = json.loads(only(last_stage(file), "ENTRYPOINT"))
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run([*entry, "/model", "--port", "a b"], env={"PATH": path}, capture_output=True, text=True)
    assert said.stdout == "0007\nserve /model --port a b\n"


@every_file
def test_it_has_a_health_check_and_stops_on_sigterm(file: str) -> None:
    found = last_stage(file)
    assert only(found, "STOPSIGNAL") == "SIGTERM"
    health = only(found, "HEALTHCHECK")
    assert re.search(r"--start-period=\d+m", health)
    code = json.loads(health.partition("CMD ")[2])[2]
    compile(code, file, "exec")
    assert "HEALTH_URL" in code
    assert environment(file)["HEALTH_URL"].endswith(f":{only(found, 'EXPOSE')}/health")


@every_file
def test_copied_files_exist_and_are_not_ignored(file: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = [value.split()[:-1] for name, value in steps(file) if name == "COPY" and "--from" not in value]
    sources = {source.removeprefix("./") for sources in copied for source in sources}
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert "ADD" not in {name for name, _ in steps(file)}


@every_file
def test_it_has_the_projects_version_and_no_secret(file: str) -> None:
    assert arguments(file)["VERSION"] == PROJECT["version"]
    names = " ".join([*arguments(file), *environment(file)])
    assert not re.search("KEY|TOKEN|SECRET|PASSWORD", names)


def test_compose_builds_these_images_and_publishes_on_loopback_only() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    built = {name: service["build"] for name, service in services.items() if "build" in service}
    assert built == {"gpu": {"context": ".."}, "cpu": {"context": "..", "dockerfile": "Dockerfile.cpu"}}
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert {name for name in named if not name.startswith(".")} <= set(compose["volumes"])
        assert all((DEPLOY / name).exists() for name in named if name.startswith("."))
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    for name in built:
        assert services[name]["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
        assert {volume.split(":")[1] for volume in services[name]["volumes"]} >= {"/cache", "/state"}
        set_here = [key for key in services[name]["environment"] if key.startswith("DARTS_")]
        assert {key.removeprefix("DARTS_").lower() for key in set_here} <= set(Settings.model_fields)
