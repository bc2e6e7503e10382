import subprocess
import sys
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.deploy.names import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=240)
    [file] = folder.glob("*.whl")
    return ZipFile(file)


def test_it_holds_exactly_the_package(wheel: ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {file for file in (ROOT / "darts_server").rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert packed == {str(file.relative_to(ROOT)) for file in files}
    assert "darts_server/http/page/page.html" in packed


def test_it_declares_the_command_and_the_plugin_of_vllm(wheel: ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    points = ConfigParser()
    points.read_string(wheel.read(name).decode())
    assert points["console_scripts"]["darts-server"] == "darts_server.cli:main"
    module, _, function = points["vllm.general_plugins"]["darts_server"].partition(":")
    assert function in (ROOT / Path(*module.split(".")).with_suffix(".py")).read_text()


def test_it_requires_no_engine_without_an_extra(wheel: ZipFile) -> None:
    [name] = [name for name in wheel.namelist() if name.endswith("METADATA")]
    required = message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []
    assert required
    assert not [text for text in required if text.startswith(("vllm", "torch")) and "extra ==" not in text]
