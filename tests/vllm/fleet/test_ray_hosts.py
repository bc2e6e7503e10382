"""The Ray cluster that ``--replicas`` starts on this machine. Nothing here has an engine."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.vllm.fleet.ray_hosts import private_folder

pytest.importorskip("ray")
SECONDS = 120
"""Seconds for Ray to start and end on a busy machine: many times the usual time."""
EXPORT_SECONDS = 10.0
"""Seconds that Ray waits at its end to export metrics to a dead head, besides five seconds for events."""


def start_cluster(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.vllm.fleet.own_cluster", *arguments]
    environment = os.environ | {"RAY_TMPDIR": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: Ray's sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def test_our_own_cluster_belongs_to_this_user_alone_and_needs_no_cpu(folder: Path) -> None:
    ended = start_cluster(folder)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[0])
    assert {address.removeprefix("::ffff:") for address in found["listening"]} == {"127.0.0.1"}
    assert found["mode"] == "0o700"
    assert "session_latest" in found["sessions"]


def test_ray_does_not_wait_for_a_dead_head_when_it_ends(folder: Path) -> None:
    """If its end takes longer than `STOP_SECONDS`, Ray ends the process, with an exit code of its own."""
    ended = start_cluster(folder, "lose-head")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["seconds"] < EXPORT_SECONDS


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / f"darts-{os.getuid()}"
    link.symlink_to(other)
    with pytest.raises(OSError, match="is not a folder of this user"):
        private_folder()
    link.unlink()
    assert private_folder() == link / "ray"
    link.chmod(0o777)
    private_folder()
    assert oct(link.stat().st_mode)[-3:] == "700"
