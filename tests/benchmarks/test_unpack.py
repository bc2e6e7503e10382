"""Laying a bundle out, with nothing but Python's standard library, from parts that come as they may."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.packing import archive, unpack

CONTENT = {"pkg/__init__.py": b"X = 1\n" * 1000, "pkg/deep/data.bin": bytes(range(256)) * 20, "pkg/empty": b""}
PYTHON = ".".join(map(str, sys.version_info[:2]))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make(tmp_path / "bundle", CONTENT)


def make(out: Path, content: dict[str, bytes], python: str = PYTHON, limit: int = 100) -> Path:
    """A bundle in parts so small that it has several."""
    source = out.with_name(f"{out.name}.source")
    for name, data in content.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    out.mkdir()
    splitter = archive.Splitter(out, limit)
    archive.write(source, splitter, 1, 1, lambda size: None)
    whole = {"size": splitter.size, "sha256": splitter.sha256, "unpacked": sum(map(len, content.values()))}
    parts = [{"name": p.name, "size": p.size, "sha256": p.sha256} for p in splitter.parts()]
    manifest = {"target": {"python": python}, "archive": whole, "parts": parts, "roots": ["vllm", "darts_server.app"]}
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / "unpack").write_bytes(Path(unpack.__file__).read_bytes())
    return out


def run(bundle: Path, *arguments: str, check: bool = False) -> tuple[int, str]:
    """Status and all that was said. ``-I -S``: nothing of the environment and no installed package is there."""
    command = [sys.executable, "-I", "-S", str(bundle / "unpack"), "--into", str(bundle.parent / "site"), *arguments]
    done = subprocess.run([*command, *([] if check else ["--no-check"])], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def laid_out(bundle: Path) -> dict[str, bytes]:
    site = bundle.parent / "site"
    files = (path for path in site.rglob("*") if path.is_file() and path != site / "manifest.json")
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in files}


def test_all_parts_at_once(bundle: Path) -> None:
    assert len(list(bundle.glob("bundle.tar.xz.*"))) > 2
    status, said = run(bundle)
    assert (status, laid_out(bundle)) == (0, CONTENT)
    assert f"export PYTHONPATH={bundle.parent / 'site'}" in said
    assert not list(bundle.parent.glob("site.*"))


def test_parts_may_come_one_at_a_time_and_be_gone_when_the_next_one_comes(bundle: Path) -> None:
    parts = sorted(bundle.glob("bundle.tar.xz.*"), reverse=True)
    elsewhere = bundle.parent / "elsewhere"
    elsewhere.mkdir()
    for part in parts:
        part.rename(elsewhere / part.name)
    status, said = run(bundle)
    assert (status, f"missing: {', '.join(p.name for p in reversed(parts))}" in said) == (1, True)
    for number, part in enumerate(parts, 1):
        (elsewhere / part.name).rename(part)
        status, said = run(bundle)
        assert f"{part.name} is right" in said
        assert said.count("is right") == 1
        part.unlink()
        (bundle / "manifest.json").unlink(missing_ok=True)  # needed the first time only
        assert status == (0 if number == len(parts) else 1)
    assert laid_out(bundle) == CONTENT


def test_a_damaged_part_is_named_and_nothing_else_is_done_again(bundle: Path) -> None:
    bad = bundle / "bundle.tar.xz.02"
    good = bad.read_bytes()
    bad.write_bytes(good[:-1] + b"?")
    status, said = run(bundle)
    assert (status, "damaged, bring again: bundle.tar.xz.02" in said) == (1, True)
    assert "missing" not in said
    for other in bundle.glob("bundle.tar.xz.*"):
        other.write_bytes(b"no longer read")
    bad.write_bytes(good)
    status, said = run(bundle)
    assert (status, said.count("is right"), laid_out(bundle)) == (0, 1, CONTENT)


def test_a_bundle_that_is_laid_out_already_is_left_alone(bundle: Path) -> None:
    run(bundle)
    (bundle.parent / "site" / "mine").write_text("kept")
    for part in bundle.glob("bundle.tar.xz.*"):
        part.unlink()
    assert run(bundle)[0] == 0
    assert (bundle.parent / "site" / "mine").exists()


def test_another_bundle_s_parts_are_dropped_but_its_folder_is_not_touched(bundle: Path) -> None:
    other = make(bundle.parent / "other", {"other": b"other" * 500}, limit=60)
    (other / "bundle.tar.xz.02").unlink()
    assert run(other)[0] == 1
    assert run(bundle)[0] == 0
    status, said = run(other)
    assert (status, "holds another bundle" in said) == (2, True)
    assert laid_out(bundle) == CONTENT


def test_a_folder_with_other_things_is_refused(bundle: Path) -> None:
    (bundle.parent / "site").mkdir()
    (bundle.parent / "site" / "theirs").write_text("theirs")
    status, said = run(bundle)
    assert (status, "is not empty" in said, laid_out(bundle)) == (2, True, {"theirs": b"theirs"})


@pytest.mark.parametrize(("manifest", "message"), [(None, "manifest.json is missing"), ('{"tar', "is damaged")])
def test_without_its_manifest_nothing_is_done(bundle: Path, manifest: str | None, message: str) -> None:
    (bundle / "manifest.json").unlink()
    if manifest is not None:
        (bundle / "manifest.json").write_text(manifest)
    status, said = run(bundle)
    assert (status, message in said, (bundle.parent / "site").exists()) == (1, True, False)


def test_a_bundle_for_another_python_is_refused(tmp_path: Path) -> None:
    status, said = run(make(tmp_path / "bundle", CONTENT, python="3.99"))
    assert (status, f"this bundle is for Python 3.99, and this is {PYTHON}" in said) == (2, True)


def test_a_whole_that_is_not_what_the_manifest_says_is_not_laid_out(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["archive"]["sha256"] = "0" * 64
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, said = run(bundle)
    assert (status, "make the bundle again" in said, (bundle.parent / "site").exists()) == (1, True, False)


def test_too_little_room_is_said_before_anything_is_written(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["archive"]["unpacked"] = 1e18
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, said = run(bundle)
    assert (status, "MB are needed" in said, (bundle.parent / "site").exists()) == (2, True, False)


TORCH = "class cuda:\n is_available = staticmethod(lambda: {})\n get_device_name = staticmethod(lambda: 'a card')\n"
VLLM = {
    "torch/__init__.py": "__version__ = '2.11.0+cu130'\n" + TORCH.format(True),
    "vllm/__init__.py": "print('noise')\n__version__ = '0.26.0'\n",
    "vllm/platforms.py": "class current_platform:\n device_type = 'cuda'\n",
    "darts_server/__init__.py": "",
    "darts_server/app.py": "",
}


@pytest.mark.parametrize(
    ("changed", "status", "line"),
    [
        ({}, 0, "import vllm sees the GPU: a card (vLLM 0.26.0, torch 2.11.0+cu130, Python "),
        (
            {"vllm/platforms.py": "class current_platform:\n device_type = ''\n"},
            3,
            "import vllm works, but sees no GPU (",
        ),
        ({"torch/__init__.py": "__version__ = '2'\n" + TORCH.format(False)}, 3, "import vllm works, but sees no GPU ("),
        ({"vllm/__init__.py": "import gone"}, 3, "import vllm fails: ModuleNotFoundError: No module named 'gone'"),
        ({"darts_server/app.py": "1 / 0"}, 3, "import darts_server.app fails: ZeroDivisionError: division by zero"),
        ({"vllm/__init__.py": "import os; os._exit(9)"}, 3, "import vllm fails: it died without a word"),
    ],
)
def test_one_line_says_whether_vllm_sees_the_gpu(
    tmp_path: Path, changed: dict[str, str], status: int, line: str
) -> None:
    content = {name: source.encode() for name, source in (VLLM | changed).items()}
    got, said = run(make(tmp_path / "bundle", content), check=True)
    assert (got, said.splitlines()[-1][: len(line)]) == (status, line)
