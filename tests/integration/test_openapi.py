"""The running server does what its OpenAPI description says, and rejects malformed bodies."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from darts_server.demo.server import DARTS, Server
from tests.integration.fork_server import Serve
from tests.integration.waiting import wait_idle

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
KEY = "Authorization: Bearer secret"
# A schema can describe neither sampling parameters, which vLLM checks, nor the content of a saved state.
# Starlette's 405 names only the methods of the first route of a path.
NOT_CHECKED = "positive_data_acceptance,allow_header_conformance"


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own, because its policy and state are changed at random."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serve(DARTS, log, "--api-key", "secret", "--max-group-size", "4") as running:
        yield running


@pytest.mark.nightly
def test_schemathesis_finds_no_contradiction_to_the_description(guarded: Server, tmp_path: Path) -> None:
    refusals = "400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429"  # 413: too many items may be too many bytes
    (tmp_path / "schemathesis.toml").write_text(f"[checks.negative_data_rejection]\nexpected-statuses = [{refusals}]\n")
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{guarded.url}/openapi.json"]
    command += ["--include-path-regex", "^/darts/v1"]
    command += ["--header", KEY, "--exclude-checks", NOT_CHECKED]
    command += ["--max-examples", "40", "--seed", "1", "--request-timeout", "60"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout.partition("= FAILURES =")[2][:5000] + ran.stderr[-2000:]
    assert "nresolvable" not in ran.stdout
    wait_idle(guarded)
