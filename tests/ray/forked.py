"""``python -m tests.ray.forked PID ...``: ``darts_server.ray.child`` whose server the test run's fork server forks.

It takes two seconds of a core in place of twenty. This process hands its signals on to the fork and ends as that does;
the fork ends with this process.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from darts_server.vllm.plugin import end_when_gone, end_with_process
from tests.conftest import FORKS
from tests.integration.fork_server import Forks

IN_FORK = "--in-fork"


def main(arguments: list[str]) -> int:
    """Run the server in a fork; return its exit code."""
    read, write = os.pipe()  # by its path, Ray's log file would be truncated
    forks = Forks(os.environ[FORKS])
    command = [__spec__.name, IN_FORK, str(os.getpid()), *arguments]
    process = forks.launch(command, Path(f"/proc/self/fd/{write}"), os.environ)
    os.close(write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: process.send_signal(signal.Signals(number)))
    with open(read, "rb", buffering=0) as output:
        while text := output.read(1 << 16):
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
    code = process.wait()
    if code < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return code


if __name__ == "__main__":
    if sys.argv[1] == IN_FORK:
        del sys.argv[1]
        end_when_gone(int(sys.argv.pop(1)))
        runpy.run_module("darts_server", run_name="__main__", alter_sys=True)
    else:
        end_with_process(int(sys.argv.pop(1)))
        sys.exit(main(sys.argv[1:]))
