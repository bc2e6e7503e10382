import re
from argparse import Namespace
from pathlib import Path

import pytest

from darts_server.cli import main
from darts_server.demo.server import MODEL
from darts_server.doctor.findings import Verdict
from darts_server.doctor.serving import check_address, check_probe
from darts_server.http.security.access import Access, Keys
from darts_server.settings import load
from darts_server.vllm import checks

LINE = re.compile(r"(ok   |warn |FAIL ) [\w ]+ +\S.*")


@pytest.fixture(autouse=True)
def keep_logging_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("darts_server.logs.set_up", lambda *_: None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def test_a_public_address_fails_without_keys_or_explicit_permission() -> None:
    public, local = Namespace(uds=None, host="0.0.0.0"), Namespace(uds=None, host="127.0.0.1")
    assert check_address(public, Access(), False).verdict is Verdict.FAIL
    assert check_address(public, Access(), True).verdict is Verdict.WARN
    assert check_address(public, Access(Keys(["one"])), False).verdict is Verdict.OK
    assert check_address(local, Access(), False).verdict is Verdict.OK
    assert check_address(Namespace(uds="/s"), Access(), False).verdict is Verdict.OK
    assert "one" not in str(check_address(public, Access(Keys(["one"])), False)).split()


def test_a_policy_that_needs_hidden_states_fails_where_they_are_not_available() -> None:
    fault = checks.probe_fault(Namespace(prefill_context_parallel_size=2))
    assert fault is not None
    assert checks.probe_fault(Namespace(runner="pooling")) is not None
    assert checks.probe_fault(Namespace(runner="auto", prefill_context_parallel_size=1)) is None
    arrol = load({"policy": "arrol", "quality": "head"}, None)
    assert check_probe(arrol, None).verdict is Verdict.OK
    assert "--quality logprob" in check_probe(arrol, fault).message
    assert check_probe(arrol, fault).verdict is Verdict.FAIL
    assert (
        check_probe(load({"policy": "arrol", "quality": "head", "quality_fallback": "logprob"}, None), fault).verdict
        is Verdict.WARN
    )
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
    _, fault = checks.model(Namespace(model=name, revision=None))
    assert (fault is None) if expected_fault is None else (expected_fault in str(fault))


def test_a_folder_without_a_model_fails_and_the_size_of_a_model_is_found(tmp_path: Path) -> None:
    assert "config.json" in str(checks.model(Namespace(model=str(tmp_path), revision=None))[1])
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
    (tmp_path / "state.db").write_bytes(b"not a database at all" * 100)
    assert main(["serve", str(MODEL), "--port", "0", "--state-dir", str(tmp_path)]) == 2
    assert "FAIL  state" in capsys.readouterr().err
