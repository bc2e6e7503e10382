"""The sync client is generated when the package is built, and by the script alone."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from hatch_build import generate

CLIENTS = Path(__file__).parents[2] / "clients"
ASYNC = {path.name for path in (CLIENTS / "darts_client").glob("_async_*.py")}
SYNC = {name.replace("async", "sync") for name in ASYNC}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The package as it is in git, without generated modules."""
    folder = tmp_path / "clients"
    shutil.copytree(CLIENTS, folder, ignore=shutil.ignore_patterns("_sync_*.py", "__pycache__"))
    (folder / ".gitignore").write_text("_sync_*.py\n")
    return folder


def test_wheel_and_sdist_have_both_clients(checkout: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--target", "sdist"]
    subprocess.run(build, cwd=checkout, check=True, capture_output=True, timeout=240)
    [wheel], [sdist] = (checkout / "dist").glob("*.whl"), (checkout / "dist").glob("*.tar.gz")
    assert {f"darts_client/{name}" for name in ASYNC | SYNC} <= set(ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        packed = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    assert {"hatch_build.py", *(f"darts_client/{name}" for name in ASYNC | SYNC)} <= packed


def test_modules_follow_their_sources(checkout: Path) -> None:
    package = checkout / "darts_client"
    generate(package)
    assert {path.name for path in package.glob("_sync_*.py")} == SYNC
    (package / "_async_client.py").write_text("class AsyncClient:\n    async def aclose(self) -> None: ...\n")
    (package / "_async_rollouts.py").unlink()
    generate(package)
    assert "class Client:\n    def close(self) -> None: ...\n" in (package / "_sync_client.py").read_text()
    assert not (package / "_sync_rollouts.py").exists()
