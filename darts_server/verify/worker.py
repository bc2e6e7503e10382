"""A verifier's process: ``python -m darts_server.verify.worker CHANNEL RECORD SERVER``.

The arguments are the file descriptors of the socket and of the memory for `RUNNING_CALL`, and the server's process id.

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


def main(channel_fd: int, call_record_fd: int, server_pid: int) -> None:
    # Ctrl-C does not reach the group. A new session would get its own share of the cores, whatever its priority.
    os.setpgid(0, 0)
    worker_pid = os.fork()
    # This process is the guard. It stays small, because the loop is imported after the fork.
    if worker_pid == 0:
        from darts_server.verify.loop import serve_batches

        os.nice(NICE)
        serve_batches(channel_fd, call_record_fd)
        os._exit(0)

    pidfds = []
    try:
        pidfds = [os.pidfd_open(pid) for pid in (server_pid, worker_pid)]
    except ProcessLookupError:
        # The server has ended already.
        os.killpg(0, signal.SIGKILL)
    # A pidfd is readable once its process has ended.
    select.select(pidfds, [], [])
    ended_pid, status = os.waitpid(worker_pid, os.WNOHANG)
    if ended_pid:
        exit_code = os.waitstatus_to_exitcode(status)
        fault = f"its process, which exited with status {exit_code}"
        if exit_code < 0:
            fault = f"its process, which was killed by {signal.Signals(-exit_code).name}"
        with socket.socket(fileno=channel_fd) as sock:
            sock.send(b'{"fault":"%s"}\n' % fault.encode(), socket.MSG_DONTWAIT)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
