"""A server process that ends with its owner, an actor that Ray may kill together with its child processes.

    python -m darts_client.verl.process FOLDER COMMAND...

The child of the owner forks a guard, which Ray does not see, and exits with the command's code. The guard reads a pipe
from the owner, which closes when the owner ends. FOLDER holds the files of a Ray job on this machine.
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
    """Start a command below a guard. The returned process exits with the command's code, or when the guard ends."""
    starter = (sys.executable, "-m", "darts_client.verl.process", str(folder))
    return await asyncio.create_subprocess_exec(
        *starter,
        *command,
        stdin=asyncio.subprocess.PIPE,
        env=env,
    )


def main() -> int:
    exit_code_reader, exit_code_writer = os.pipe()
    if os.fork() == 0:
        os.close(exit_code_reader)
        # Ray kills the process group of an actor.
        os.setsid()
        _guard_server(Path(sys.argv[1]), sys.argv[2:], exit_code_writer)
        return 0
    os.close(exit_code_writer)
    # Waits for the guard. If the guard was killed, its pipe closes without a code.
    return int(os.read(exit_code_reader, 16) or b"1")


def _guard_server(folder: Path, command: Sequence[str], exit_code_writer: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # The last guard of the job's servers on this machine removes the folder.
    marker = folder / f"{MARKER}{os.getpid()}"
    marker.touch()
    # With its own process group, its engine can be killed, too.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    owner_has_ended = threading.Event()

    def wait_for_owner() -> None:
        # Standard input is the owner's pipe. The lock of `sys.stdin` would still be taken at exit.
        while os.read(0, 1):
            pass
        owner_has_ended.set()
        server.terminate()
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=wait_for_owner, daemon=True).start()
    exit_code = server.wait()
    # Processes of the server's engine may be left.
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    # If the server alone has ended, its owner starts it again, and needs the files.
    marker.unlink(missing_ok=True)
    if owner_has_ended.is_set() and not list(folder.glob(f"{MARKER}*")):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(BrokenPipeError):
        os.write(exit_code_writer, str(exit_code % 256).encode())


if __name__ == "__main__":
    sys.exit(main())
