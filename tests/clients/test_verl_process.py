"""A guarded server outlives neither its owner nor its engine processes, and the job's files go with the last guard."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

OWNER = """
import asyncio, os, sys
from pathlib import Path
from darts_client.verl.process import start_guarded

async def main():
    server = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    folder = Path(sys.argv[1])
    process = await start_guarded(folder, [sys.executable, "-c", server], os.environ)
    print(process.pid, flush=True)
    print("code", await process.wait(), flush=True)

asyncio.run(main())
"""
SECONDS = 60.0


def start_owner(folder: Path) -> tuple[subprocess.Popen[str], set[int]]:
    """Return an owner, and the processes of its child and of its server, of which one is the owner's child."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert owner.stdout is not None
    return owner, {int(owner.stdout.readline()), int(owner.stdout.readline())}


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_server_ends_and_its_files_go_when_ray_kills_the_owners_process_group(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    owner, processes = start_owner(folder)
    [child] = [process for process in processes if parent_of(process) == owner.pid]
    [server] = processes - {child}
    assert folder.is_dir()
    os.killpg(owner.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{server}").exists())
    wait_until(lambda: not folder.exists())
    owner.communicate()


def test_the_files_stay_when_the_server_alone_ends(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    owner, processes = start_owner(folder)
    [server] = [process for process in processes if parent_of(process) != owner.pid]
    os.kill(server, signal.SIGKILL)
    assert owner.communicate(timeout=SECONDS)[0] == "code 247\n"
    assert folder.is_dir()
    assert not list(folder.glob("guard-*"))
