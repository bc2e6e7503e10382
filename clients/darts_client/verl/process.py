"""A server process that ends with its owner.

Ray kills actors, so an actor cannot stop its server. The server runs below a guard, whose standard input is a pipe from
the owner: the pipe closes when the owner ends, however it ends.

    python -m darts_client.verl.process FOLDER COMMAND...

FOLDER holds the files of a job on this machine. Each guard has a marker in it, and the last guard removes the folder.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 30.0
"""The server stops within a few seconds."""
MARKER = "guard-"


async def start_guarded(folder: Path, command: Sequence[str], env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a command below a guard. The returned process is the guard, which exits with the command's code."""
    guard = (sys.executable, "-m", "darts_client.verl.process", str(folder))
    return await asyncio.create_subprocess_exec(*guard, *command, stdin=asyncio.subprocess.PIPE, env=env)


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / f"{MARKER}{os.getpid()}"
    marker.touch()
    # A group of its own, because a server that is killed leaves its engine process behind.
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_wait_for_owner, args=(child,), daemon=True).start()

    code = child.wait()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    marker.unlink(missing_ok=True)
    # If the server alone has ended, its owner starts it again, and needs the files.
    if _owner_has_ended.is_set() and not list(folder.glob(f"{MARKER}*")):
        shutil.rmtree(folder, ignore_errors=True)
    return code


_owner_has_ended = threading.Event()


def _wait_for_owner(child: subprocess.Popen[bytes]) -> None:
    """Stop the child when the owner has ended."""
    # Not `sys.stdin`, whose lock this thread would hold at exit.
    while os.read(0, 1):
        pass
    _owner_has_ended.set()
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


if __name__ == "__main__":
    sys.exit(main())
