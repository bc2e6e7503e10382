"""A verifier's process: ``python -m darts_server.verify.worker CHANNEL TABLE SERVER``.

The arguments are the file descriptors of the socket and of the table in shared memory, and the server's process id.

Two processes run: the worker, which runs the user's code, and its guard. When the worker ends, or the server, the guard
kills the whole process group. So programs that the user's code has started end too, even if the code holds the
interpreter lock for ever.
"""

import os
import select
import signal
import socket
import sys

NICE = 5
"""Serving has priority."""


def main(channel: int, table: int, server: int) -> None:
    # Ctrl-C does not reach the group. A new session would get its own share of the cores, whatever its priority.
    os.setpgid(0, 0)
    worker = os.fork()
    # Imported after the fork, so that the guard stays small.
    if worker == 0:
        from darts_server.verify.loop import serve_batches

        os.nice(NICE)
        serve_batches(channel, table)
        os._exit(0)

    pidfds = []
    try:
        pidfds = [os.pidfd_open(pid) for pid in (server, worker)]
    except ProcessLookupError:
        # The server has ended already.
        os.killpg(0, signal.SIGKILL)
    # A pidfd is readable once its process has ended.
    select.select(pidfds, [], [])
    ended_pid, status = os.waitpid(worker, os.WNOHANG)
    if ended_pid:
        exit_code = os.waitstatus_to_exitcode(status)
        fault = f"its process, which exited with status {exit_code}"
        if exit_code < 0:
            fault = f"its process, which was killed by {signal.Signals(-exit_code).name}"
        with socket.socket(fileno=channel) as sock:
            sock.send(b'{"fault":"%s"}\n' % fault.encode(), socket.MSG_DONTWAIT)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
