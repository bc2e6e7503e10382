import socket
import sys
from pathlib import Path

import pytest

from darts_server.cli import main
from darts_server.offline.demo.command import list_methods, parse_arguments
from darts_server.offline.demo.runs import Method


@pytest.mark.parametrize("argv", [["--steps", "0"], ["--prompts", "0"], ["--group-size", "1"], ["--caps", "0"]])
def test_invalid_flags_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(argv)
    assert argv[0] in capsys.readouterr().err


def test_raw_is_compared_with_a_smaller_limit_and_with_policies() -> None:
    compared = list_methods(parse_arguments(["--caps", "32", "48", "--policies", "uniform"]))
    limits = {"raw, max 32": Method("off", 32), "raw, max 48": Method("off", 48)}
    assert compared == {"raw": Method("off"), **limits, "uniform": Method("uniform")}
    assert "raw, max 64" in list_methods(parse_arguments([]))
    assert list_methods(parse_arguments([]))["auto, speculation"] == Method("auto", ahead=0.5, drafts=True)
    # The name of a policy may have a plus itself.
    assert "darts+arrol" in list_methods(parse_arguments(["--policies", "darts+arrol"]))
    assert list(list_methods(parse_arguments(["--caps", "--policies", "raw"]))) == ["raw"]


def test_demo_says_how_to_install_vllm_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Python then takes it for missing.
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["demo"]) == 1
    assert 'pip install "darts-server[cpu]"' in capsys.readouterr().err


def test_demo_fails_if_its_port_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["demo", "--port", str(taken.getsockname()[1]), "--out", str(tmp_path)]) == 1
    assert "in use" in capsys.readouterr().err
