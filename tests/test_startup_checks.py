import os
import re
import socket
from argparse import Namespace
from pathlib import Path

import pytest

from darts_server.cli import main
from darts_server.http.security.access import Access, Keys
from darts_server.offline.demo.server import MODEL
from darts_server.settings import load
from darts_server.startup_checks import (
    Verdict,
    check_address,
    check_file_descriptors,
    check_local,
    check_policy,
    check_port,
    check_probe,
    check_shared_memory,
    check_state,
    check_verifiers,
    check_weights,
)
from darts_server.store import Store
from darts_server.vllm import checks

HERE = "127.0.0.1"
DAMAGED = b"not a database at all" * 100
LINE = re.compile(r"(ok   |warn |FAIL ) [\w ]+ +\S.*")

as_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.fixture(autouse=True)
def keep_logging_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.logs.set_up", lambda *_: None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_a_taken_port_fails_with_the_remedy() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        finding = check_port(HERE, port)
    assert finding.verdict is Verdict.FAIL
    assert f"{HERE}:{port}" in finding.message
    assert "--port" in finding.message
    assert check_port(HERE, port).verdict is Verdict.OK
    assert check_port("192.0.2.1", port).verdict is Verdict.FAIL, "not an address of this machine"


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ({}, Verdict.OK),
        ({"group_size": "8"}, Verdict.WARN),
        ({"group_size": "8", "policy": "uniform"}, Verdict.OK),
    ],
)
def test_a_group_size_that_no_policy_uses_is_a_warning(settings: dict[str, str], verdict: Verdict) -> None:
    found = check_policy(load(settings, None))
    assert found.verdict is verdict
    assert verdict is Verdict.OK or "--policy uniform" in found.message


@pytest.mark.parametrize(
    ("verifiers", "verdict", "message"),
    [
        ([], Verdict.OK, "none"),
        (["boxed", "n=regex:(a)"], Verdict.OK, "boxed, n"),
        (["boxed", f"{__file__}:missing"], Verdict.OK, "boxed, missing (their code is loaded by serve only)"),
        (["boxes"], Verdict.FAIL, "--verifier boxes: 'boxes' is no verifier; give FILE.py:FUNCTION"),
    ],
)
def test_verifiers_are_checked_without_running_their_code(verifiers: list[str], verdict: Verdict, message: str) -> None:
    found = check_verifiers(load({"verifier": verifiers}, None))
    assert found.verdict is verdict
    assert found.message.startswith(message)


def test_too_little_memory_or_disk_or_too_few_descriptors_are_a_warning(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path, 1).verdict is check_file_descriptors(1).verdict is Verdict.OK
    for finding, remedy in (
        (check_shared_memory(tmp_path, 1 << 62), "--shm-size"),
        (check_shared_memory(tmp_path / "none"), "does not exist"),
        (check_file_descriptors(1 << 62), "ulimit"),
        (check_state(tmp_path, 1 << 62), "make room"),
    ):
        assert finding.verdict is Verdict.WARN
        assert remedy in finding.message


def test_a_server_on_a_unix_socket_has_no_port_to_check() -> None:
    args = Namespace(host=HERE, port=0, model=str(MODEL), revision=None)
    for uds, has_port in ((None, True), ("/s", False)):
        subjects = [finding.subject for finding in check_local(load({}, None), Namespace(**vars(args), uds=uds))]
        assert ("port" in subjects) == has_port


def test_an_existing_or_creatable_state_folder_is_ok_and_nothing_is_created(tmp_path: Path) -> None:
    assert check_state(None).verdict is Verdict.OK
    assert check_state(tmp_path / "new" / "state").verdict is Verdict.OK
    assert not (tmp_path / "new").exists()
    with Store(tmp_path / "old") as store:
        store.put("prompt", "p", {"count": 1})
    assert check_state(tmp_path / "old").verdict is Verdict.OK


def test_a_state_that_cannot_be_used_fails_and_is_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    file.write_bytes(DAMAGED)
    for folder in (tmp_path, file, file / "below"):
        assert check_state(folder).verdict is Verdict.FAIL
    assert file.read_bytes() == DAMAGED
    assert list(tmp_path.iterdir()) == [file]


@as_user
def test_a_folder_without_write_permission_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert check_state(tmp_path).verdict is Verdict.FAIL
    assert [finding.verdict for finding in check_weights(None, tmp_path, None)] == [Verdict.FAIL]


def test_staging_needs_room_for_two_models(tmp_path: Path) -> None:
    root, staging = check_weights(tmp_path, tmp_path, 1000)
    assert (root.verdict, staging.verdict) == (Verdict.OK, Verdict.OK)
    [staging] = check_weights(None, tmp_path, 1 << 60)
    assert staging.verdict is Verdict.WARN
    assert "--weights-staging" in staging.message
    [staging] = check_weights(None, None, None)
    assert staging.verdict is Verdict.OK


def test_a_public_address_fails_without_keys_or_explicit_permission() -> None:
    public = Namespace(uds=None, host="0.0.0.0")
    assert check_address(public, Access(), False).verdict is Verdict.FAIL
    assert check_address(public, Access(), True).verdict is Verdict.WARN
    assert check_address(public, Access(Keys(["one"])), False).verdict is Verdict.OK
    assert check_address(Namespace(uds="/s"), Access(), False).verdict is Verdict.OK


def test_a_policy_that_needs_hidden_states_fails_where_they_are_not_available() -> None:
    fault = checks.probe_fault(Namespace(prefill_context_parallel_size=2))
    assert fault is not None
    assert checks.probe_fault(Namespace(runner="pooling")) is not None
    assert checks.probe_fault(Namespace(runner="auto", prefill_context_parallel_size=1)) is None
    head = {"policy": "arrol", "quality": "head"}
    assert check_probe(load(head, None), None).verdict is Verdict.OK
    failed = check_probe(load(head, None), fault)
    assert (failed.verdict, "--quality logprob" in failed.message) == (Verdict.FAIL, True)
    assert check_probe(load({"policy": "arrol", "quality": "logprob"}, None), fault).verdict is Verdict.OK
    assert check_probe(load({}, None), fault).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("name", "expected_fault"),
    [
        (str(MODEL), None),
        ("/nowhere/at/all", "does not exist"),
        ("s3://bucket/model", None),
        ("nobody/nothing", "HF_HUB_OFFLINE"),
    ],
)
def test_a_missing_model_is_a_fault(name: str, expected_fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _, fault = checks.check_model(Namespace(model=name, revision=None))
    if expected_fault is None:
        assert fault is None
    else:
        assert expected_fault in str(fault)


def test_a_folder_without_a_model_fails_and_the_size_of_a_model_is_found(tmp_path: Path) -> None:
    assert "config.json" in str(checks.check_model(Namespace(model=str(tmp_path), revision=None))[1])
    assert (checks.model_bytes(Namespace(model=str(MODEL))) or 0) > 100_000
    assert checks.model_bytes(Namespace(model="some/name")) is None


def test_doctor_prints_a_line_for_each_check_and_exits_with_1_if_one_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(MODEL), "--port", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    subjects = {line[6:].split("  ")[0].strip() for line in lines}
    assert subjects >= {"settings", "Python", "memory", "files", "port", "state", "staging", "probe", "address", "vLLM"}
    assert subjects >= {"devices", "model"}
    assert main(["doctor", "/nowhere", "--port", "0", "--host", "0.0.0.0"]) == 1
    assert capsys.readouterr().out.count("FAIL") == 2


def test_doctor_prints_invalid_settings_as_a_failed_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "m", "--redundancy", "0.5"]) == 1
    assert "FAIL  settings   --redundancy = 0.5" in capsys.readouterr().out
    assert main(["doctor", "--help"]) == 0


def test_serve_does_not_start_when_a_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.db").write_bytes(DAMAGED)
    assert main(["serve", str(MODEL), "--port", "0", "--state-dir", str(tmp_path)]) == 2
    assert "FAIL  state" in capsys.readouterr().err
