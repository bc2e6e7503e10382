import os
import subprocess
import sys
import threading

import psutil
import pytest

from darts_server.vllm.parent import SERVER_PID, end_with_parent
from tests.deploy.names import ROOT

PROCESSES = 1 + 2 + 4


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_all_processes_of_an_engine_end_when_the_server_is_killed(method: str) -> None:
    command = [sys.executable, "-m", "tests.vllm.engine_processes", method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            processes = [psutil.Process(int(server.stdout.readline())) for _ in range(PROCESSES)]
            assert all(process.is_running() for process in processes)
        finally:
            server.kill()
        assert psutil.wait_procs(processes[1:], timeout=60)[1] == []


def test_nothing_is_watched_outside_of_a_servers_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: None)
    before = threading.active_count()
    monkeypatch.setenv(SERVER_PID, "1")
    end_with_parent()
    monkeypatch.undo()
    monkeypatch.setenv(SERVER_PID, str(os.getpid()))
    end_with_parent()
    assert threading.active_count() <= before  # fewer if one of an earlier test has ended meanwhile
