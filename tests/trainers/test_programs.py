"""Trainers' own client code in environments of their own, against a real server: see `environments`, `programs`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file

from darts_server.offline.demo.server import DARTS, MODEL, Server, serving
from tests.integration.weights import perturbed, status
from tests.trainers.environments import ENVIRONMENTS, ROOT, NotInstalled, create
from tests.trainers.runs import Part, record

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]
TRAINERS = sorted({*ENVIRONMENTS, "trl"} - {"ms_swift", "openenv", "verl"})
"""`test_ms_swift.py` has the training of ms-swift. veRL starts its servers itself, see `test_verl.py`. OpenEnv has
environments and loops, and no trainer: see `test_session_harnesses.py`."""
SIZE, PROMPTS, STEPS = 4, 2, 2
GRANTED = 6
"""Candidates of a group under the policy `uniform`."""
SECONDS = 600
"""For one program: imports take most of it."""
LATER_TURNS = ("session", "tokens", "prompt")
"""Kinds of requests that continue a trajectory."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with other weights."""
    folder = tmp_path_factory.mktemp("checkpoints") / "new"
    shutil.copytree(MODEL, folder)
    save_file(perturbed(7), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def own(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--policy", "uniform", "--group-size", str(SIZE), "--enable-scale-out", "--group-pattern", "(.+)_[0-9]+")
    dialects = ("--dialect", "areal,skyrl", "--weights-root", str(weights.parent))
    log = tmp_path_factory.mktemp("trainers") / "log"
    with serving(DARTS, log, *flags, *dialects, env={"VLLM_SERVER_DEV_MODE": "1"}) as running:
        yield running


@pytest.fixture(scope="module")
def python_of() -> Iterator[Callable[[str], Path]]:
    """Return the Python of a trainer's environment; skip where it cannot be installed, but not all of them."""
    failures: dict[str, NotInstalled] = {}
    installed = set[str]()

    def find(name: str) -> Path:
        if name == "trl":
            return Path(sys.executable)
        try:
            python = create(name)
        except NotInstalled as error:
            failures[name] = error
            pytest.skip(f"{name} cannot be installed here: {error}")
        installed.add(name)
        return python

    yield find
    assert installed or not failures, f"no trainer can be installed here: {failures}"


def run(program: str, python: Path, server: Server, weights: Path) -> list[dict[str, Any]]:
    """Run a program; return the lines of its steps."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "clients")))
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "RAY_USAGE_STATS_ENABLED": "0", "WANDB_MODE": "disabled"}
    command = [str(python), "-m", f"tests.trainers.programs.{program}", server.url, str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def ended_groups(server: Server) -> list[dict[str, Any]]:
    """The groups that the monitor still shows, the newest last."""
    shown = httpx.get(f"{server.url}/darts/v1/live").json()["groups"]
    ids = [group["group_id"] for group in shown if group.get("outcome")]
    records = [httpx.get(f"{server.url}/darts/v1/groups/{each}").json()["groups"] for each in ids]
    return [record for [record] in records]


def later_turns(server: Server) -> float:
    return sum(server.metric("darts_single_requests_total", turn=kind) for kind in LATER_TURNS)


@pytest.mark.parametrize("name", TRAINERS)
def test_two_steps_of_a_trainer_have_its_groups_its_weights_and_a_raw_evaluation(
    name: str, python_of: Callable[[str], Path], own: Server, weights: Path
) -> None:
    python = python_of(name)
    version, before = status(own)["version"], {each["group_id"] for each in ended_groups(own)}
    turns = later_turns(own)
    lines = run(name, python, own, weights)
    assert [line["groups"] for line in lines] == [PROMPTS] * STEPS + [0]
    assert status(own)["version"] == version + STEPS - 1

    groups = [each for each in ended_groups(own) if each["group_id"] not in before]
    assert len(groups) == PROMPTS * STEPS
    versions = []
    for group in groups:
        selected = [each for each in group["candidates"] if each["selected_as"]]
        assert (group["outcome"], group["group_size"], len(selected)) == ("completed", SIZE, SIZE)
        assert len(group["candidates"]) == GRANTED
        [seen] = {each[key] for each in selected for key in ("weight_version_start", "weight_version_end")}
        versions.append(seen)
    assert sorted(versions) == [version] * PROMPTS + [version + 1] * PROMPTS

    parts: set[Part] = {"requests", "groups"}
    if later_turns(own) > turns:
        parts.add("later turns")
    if lines[-1]["brings_weights"]:
        parts.add("weights")
    package = "trl" if name == "trl" else ENVIRONMENTS[name].package
    record(name, package, python, parts)
