import pytest

from darts_server.cli import USAGE_ERROR, main


def test_help_teaches_the_shaping_flags_without_importing_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    assert "shaped groups" in out
    assert "--redundancy" in out
    assert "--help=all" in out


def test_a_wrong_value_stops_the_start_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", "--redundancy", "0.5"]) == USAGE_ERROR
    assert "--redundancy = 0.5" in capsys.readouterr().err


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version_tells_both(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([asked]) == 0
    assert capsys.readouterr().out.startswith("darts-server 0.1.0, vLLM 0.31")


@pytest.mark.parametrize("argv", [[], ["fly"], ["--help"]])
def test_no_or_an_unknown_command_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    captured = capsys.readouterr()
    assert "serve" in captured.out + captured.err
