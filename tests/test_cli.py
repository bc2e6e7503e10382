import pytest

from darts_server.cli import USAGE_ERROR, main
from darts_server.vllm.compat import TESTED_SERIES


def test_serve_help_explains_the_shaping_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "shaped groups" in out
    assert "--redundancy" in out
    assert "--help=all" in out


def test_an_invalid_setting_is_a_usage_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--redundancy", "0.5"]) == USAGE_ERROR
    assert "--redundancy = 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["version", "--version"])
def test_version_prints_our_version_and_vllms(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    out = capsys.readouterr().out
    assert out.startswith(tuple(f"darts-server 0.1.0, vLLM {series}." for series in TESTED_SERIES))


@pytest.mark.parametrize("argv", [[], ["fly"]])
def test_a_missing_or_unknown_command_prints_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    captured = capsys.readouterr()
    assert "serve" in captured.out + captured.err


def test_help_lists_every_command_and_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n    {command} " in out for command in ("serve", "demo", "simulate", "trace", "doctor", "version"))
    assert "darts-server demo " in out
