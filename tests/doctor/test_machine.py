import socket
from pathlib import Path

from darts_server.doctor.findings import Verdict
from darts_server.doctor.machine import (
    check_file_descriptors,
    check_machine,
    check_port,
    check_python,
    check_shared_memory,
)

HERE = "127.0.0.1"


def test_a_taken_port_fails_with_the_remedy() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        finding = check_port(HERE, port)
    assert finding.verdict is Verdict.FAIL
    assert f"{HERE}:{port}" in finding.message
    assert "--port" in finding.message
    assert check_port(HERE, port).verdict is Verdict.OK
    assert check_port("192.0.2.1", port).verdict is Verdict.FAIL, "not an address of this machine"


def test_too_little_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path, 1).verdict is Verdict.OK
    small = check_shared_memory(tmp_path, 1 << 62)
    assert small.verdict is Verdict.WARN
    assert "--shm-size" in small.message
    assert check_shared_memory(tmp_path / "none").verdict is Verdict.WARN


def test_too_few_file_descriptors_are_a_warning() -> None:
    assert check_file_descriptors(1).verdict is Verdict.OK
    assert "ulimit" in check_file_descriptors(1 << 62).message


def test_an_old_python_fails() -> None:
    assert check_python().verdict is Verdict.OK
    assert check_python((9, 0)).verdict is Verdict.FAIL


def test_a_server_on_a_unix_socket_has_no_port_to_check() -> None:
    assert "port" in [finding.subject for finding in check_machine(HERE, 0)]
    assert "port" not in [finding.subject for finding in check_machine(None, 0)]
