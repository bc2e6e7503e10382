import socket
from pathlib import Path

from darts_server.doctor.findings import Verdict
from darts_server.doctor.machine import checks, file_descriptors, free_port, python, shared_memory

HERE = "127.0.0.1"


def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        finding = free_port(HERE, port)
    assert finding.verdict is Verdict.FAIL
    assert f"{HERE}:{port}" in finding.says
    assert "--port" in finding.says
    assert free_port(HERE, port).verdict is Verdict.OK
    assert free_port("192.0.2.1", port).verdict is Verdict.FAIL, "not an address of this machine"


def test_shared_memory_is_compared_with_what_engines_need(tmp_path: Path) -> None:
    assert shared_memory(tmp_path, 1).verdict is Verdict.OK
    small = shared_memory(tmp_path, 1 << 62)
    assert small.verdict is Verdict.WARN
    assert "--shm-size" in small.says
    assert shared_memory(tmp_path / "none").verdict is Verdict.WARN


def test_so_are_file_descriptors() -> None:
    assert file_descriptors(1).verdict is Verdict.OK
    assert "ulimit" in file_descriptors(1 << 62).says


def test_an_old_python_fails() -> None:
    assert python().verdict is Verdict.OK
    assert python((9, 0)).verdict is Verdict.FAIL


def test_a_server_on_a_socket_file_has_no_port() -> None:
    assert "port" in [finding.what for finding in checks(HERE, 0)]
    assert "port" not in [finding.what for finding in checks(None, 0)]
