"""Servers with verifiers on their command line."""

import os
from pathlib import Path

import httpx
import psutil
import pytest

from darts_server.offline.demo.server import DARTS, ENVIRONMENT, FLAGS, launch
from darts_server.types import VerifierResult
from tests.deploy.recorded import exposed
from tests.integration.fork_server import Serve

pytestmark = pytest.mark.engine
CODE = Path(__file__).parents[1] / "verify" / "user_code.py"


def test_a_server_starts_its_verifiers_and_ends_them(serve_one: Serve, tmp_path: Path) -> None:
    flags = ("--verifier", "math=2*boxed", "--verifier", f"{CODE}:compute_score", "--verifier-processes", "1")
    with serve_one(DARTS, tmp_path / "log", *flags) as server:
        text = httpx.get(f"{server.url}/metrics").text
        assert "darts_verifier_calls_total" in {metric.name for metric in exposed(text)}
        for name in ("math", "compute_score"):
            for result in VerifierResult:
                labels = f'model_name="tiny",result="{result}",verifier="{name}"'
                assert f"darts_verifier_calls_total{{{labels}}} 0.0" in text
        pid = str(server.process.pid)
        # The command line of a verifier's process ends with the server's id.
        processes = [process for process in psutil.process_iter(["cmdline"]) if is_verifier(process, pid)]
        # Each verifier has a worker and its guard.
        assert len(processes) == 4
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def is_verifier(process: psutil.Process, server: str) -> bool:
    command = process.info["cmdline"] or []
    return "darts_server.verify.worker" in command and command[-1] == server


# Tests of `parse_specs` and of `Verifiers` check the same messages on every push, without a server.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("verifier", "complaint"),
    [
        ("boxes", "--verifier boxes: 'boxes' is no verifier; give FILE.py:FUNCTION"),
        (f"{CODE}:missing", f"--verifier {CODE}:missing: {CODE} has no function missing"),
    ],
)
def test_a_server_with_a_wrong_verifier_does_not_start(verifier: str, complaint: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = launch([*DARTS, *FLAGS, "--port", "0", "--verifier", verifier], log, {**os.environ, **ENVIRONMENT})
    assert process.wait(240) == 2
    text = log.read_text()
    assert complaint in text
    assert "starting the engine" not in text
