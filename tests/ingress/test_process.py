"""The process of an ingress: what it imports, its flags, its end."""

import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.demo.server import bind

HEAVY = ("torch", "vllm", "ray")


def test_it_imports_no_engine() -> None:
    program = (
        "import sys, darts_server.cli, darts_server.ingress.command;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--server-list", ","], "--server-list"),
        (["--server-list", "a:8000"], "a:8000"),
        (["--server-list", "http://a:8000/v1"], "without a path"),
        (["--server-list", "http://a:99999"], "http://a:99999"),
        (["--server-list", "http://a:1,http://a:1/"], "twice"),
        (["--server-list", "http://a:1", "--poll-interval", "0"], "--poll-interval"),
        (["--server-list", "http://a:1", "--port", "70000"], "--port"),
        (["--server-list", "http://a:1", "--grace-seconds", "-1"], "--grace-seconds"),
        (["--server-list", "http://a:1", "--group-pattern", "("], "--group-pattern"),
        (["--server-list", "http://a:1", "--group-pattern", "a"], "parentheses"),
    ],
)
def test_an_invalid_flag_is_a_usage_error_that_names_it(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ingress", *flags]) == USAGE_ERROR
    assert named in capsys.readouterr().err


def test_a_signal_ends_it_in_order() -> None:
    with bind() as free:  # one that no connection gets meanwhile
        port = free.getsockname()[1]
    flags = ["--server-list", "http://127.0.0.1:9", "--port", str(port)]
    with subprocess.Popen([sys.executable, "-m", "darts_server", "ingress", *flags], stdout=subprocess.PIPE) as process:
        try:
            answer = None
            deadline = time.monotonic() + 60
            while answer is None and time.monotonic() < deadline and process.poll() is None:
                with suppress(httpx.TransportError):
                    answer = httpx.get(f"http://127.0.0.1:{port}/health", verify=False)
                time.sleep(0.05)
            assert answer is not None
            assert answer.status_code == 503
            assert answer.json()["replicas"][0]["state"] == "lost"
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
