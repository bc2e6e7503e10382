"""What may be asked of ``pack``, and what it takes when it is not told."""

import pytest

from benchmarks.gpu.packing.asked import vllm_for
from benchmarks.gpu.packing.options import TYPICAL, arguments
from benchmarks.gpu.packing.target import read_installed


def test_vllm_follows_from_torch() -> None:
    assert vllm_for("2.11.0+cu130") == "0.26.0"
    with pytest.raises(ValueError, match=r"for torch 2\.0 is not known"):
        vllm_for("2.0")


def test_the_typical_machine_is_the_default() -> None:
    target = arguments([]).target
    assert (target.python, target.torch, arguments([]).vllm) == ("3.12", "2.11.0+cu130", "0.26.0")
    assert target.installed == read_installed(TYPICAL.read_text())
    assert not target.installed.keys() & {"vllm", "fastapi", "pydantic", "msgspec"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--python", "3"], "not two numbers"),
        (["--torch", "1.0"], "say --vllm"),
        (["--with", "numpy"], "invalid choice"),
        (["--part-size", "0"], "must be above 0"),
        (["--installed", "/nowhere"], "No such file"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_done(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(argv)
    assert message in capsys.readouterr().err
