"""``darts-server demo``, as it is installed from a wheel: without a checkout, and without Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--steps", "2", "--prompts", "8", "--group-size", "4")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our wheel, unpacked, and a module that hides Ray.

    It shadows the editable installation of this environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    [wheel] = folder.glob("*.whl")
    site = folder / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, timeout=240)
    # vLLM imports Ray where it is installed, and does without it where it is not.
    (site / "ray.py").write_text("raise ModuleNotFoundError('Ray is hidden', name='ray')\n")
    return site


def test_demo_runs_from_a_wheel_and_leaves_a_table_and_a_picture(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(installed / "bin" / "darts-server"), "demo", *QUICK]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DARTS_")}
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    log = tmp_path / "darts-demo" / "server.log"
    assert run.returncode == 0, run.stderr + (log.read_text() if log.exists() else "")
    assert "16 groups, 64 trajectories returned by each run" in run.stdout
    assert "seconds, all steps" in run.stdout
    assert all(f"{policy} takes" in run.stdout for policy in ("auto", "darts_cut", "auto, speculation"))
    assert (tmp_path / "darts-demo" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert str(installed) in log.read_text(), "the server ran from the wheel"
