"""Making a bundle, from wheels made up here; no network."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.packing import rules
from benchmarks.gpu.packing.__main__ import pack
from benchmarks.gpu.packing.asked import Project
from benchmarks.gpu.packing.imports import When
from benchmarks.gpu.packing.options import Options, arguments
from benchmarks.gpu.packing.report import Report
from benchmarks.gpu.packing.requirements import NoCandidateError
from tests.benchmarks.shelf import Shelf

EDIT = next(edit for edit in rules.EDITS if edit.path.endswith("fa_utils.py"))
VLLM = {
    "vllm/__init__.py": b"import msgspec, torch\n",
    "vllm/_C.abi3.so": b"kernels",
    "vllm/_moe_C.abi3.so": b"moe",
    "vllm/vllm-rs": b"rust",
    "vllm/third_party/deep_gemm/include/cute/a.hpp": b"header",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"fa2",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"fa3",
    "vllm/vllm_flash_attn/__init__.py": b"",
    EDIT.path: b"if True:\n" + EDIT.old.encode(),
    "vllm-0.26.0.data/purelib/vllm/plain.py": b"",
    "vllm-0.26.0.data/scripts/vllm": b"#!python",
}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    shelf = Shelf(tmp_path)
    shelf.put("vllm", "0.26.0", "torch==2.11.0", "msgspec", "tilelang", "fastapi>=0.133", files=VLLM)
    shelf.put("msgspec", "0.22")
    shelf.put("fastapi", "0.136")
    shelf.put("tilelang", "0.1")
    return shelf


@pytest.fixture
def project(tmp_path: Path) -> Project:
    root = tmp_path / "project"
    for folder in rules.FOLDERS:
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    (root / "darts_server" / "__pycache__").mkdir()
    (root / "LICENSE").write_text("the licence")
    text = '[project]\nname = "darts-server"\nversion = "1.2"\nlicense = "Apache-2.0"\ndependencies = ["fastapi"]\n'
    (root / "pyproject.toml").write_text(text)
    (root / "clients" / "pyproject.toml").write_text('[project]\nname = "darts-client"\ndependencies = ["httpx"]\n')
    return Project(root)


def options(tmp_path: Path, *more: str) -> Options:
    return arguments(["--out", str(tmp_path / "out"), "--threads", "1", "--level", "1", *more])


def made(tmp_path: Path, shelf: Shelf, project: Project, *more: str) -> tuple[Report, dict[str, bytes]]:
    """The report, and what lies in the archive."""
    report = pack(options(tmp_path, *more), shelf, project)
    whole = tmp_path / "whole.tar.xz"
    whole.write_bytes(b"".join((tmp_path / "out" / part.name).read_bytes() for part in report.parts))
    with tarfile.open(whole) as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        return report, {name: file.read() for name, file in files.items() if file is not None}


def test_a_bundle_holds_vllm_its_needs_and_the_project(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    _, files = made(tmp_path, shelf, project)
    assert {"vllm/__init__.py", "vllm/plain.py", "msgspec/__init__.py", "fastapi/__init__.py"} < files.keys()
    assert {"darts_server/__init__.py", "darts_client/__init__.py", "benchmarks/__init__.py"} < files.keys()
    assert b"\nVersion: 1.2\n" in files["darts_server-1.2.dist-info/METADATA"]
    assert not any(name.endswith(("scripts/vllm", "vllm-rs")) or "__pycache__" in name for name in files)


def test_it_can_be_laid_out_by_the_program_that_comes_with_it(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    _, files = made(tmp_path, shelf, project, "--python", version, "--part-size", "0.0003")
    command = [sys.executable, "-I", "-S", str(tmp_path / "out" / "unpack"), "--into", "site", "--no-check"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for name, data in files.items():
        assert (tmp_path / "site" / name).read_bytes() == data


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        ([], {"_vllm_fa3_C"}),
        (["--attention", "fa2"], {"_vllm_fa2_C"}),
        (["--attention", "all", "--moe"], {"_vllm_fa2_C", "_vllm_fa3_C", "_moe_C"}),
        (["--attention", "triton"], set()),
    ],
)
def test_extension_modules_come_as_asked_for(
    tmp_path: Path, shelf: Shelf, project: Project, flags: list[str], modules: set[str]
) -> None:
    report, files = made(tmp_path, shelf, project, *flags)
    found = {Path(name).name.removesuffix(".abi3.so") for name in files if name.endswith(".so")}
    assert found == modules | {"_C"}
    assert (files[EDIT.path] == b"if True:\n" + EDIT.new.encode()) == (flags == ["--attention", "triton"])
    assert (EDIT.path in report.manifest()["changed"]) == (flags == ["--attention", "triton"])


def test_every_rule_has_a_reason_and_what_is_left_out_is_counted(
    tmp_path: Path, shelf: Shelf, project: Project
) -> None:
    assert all(rule.why for rule in rules.FILES)
    assert all(rules.PACKAGES.values())
    assert all(rules.KEPT.values())
    left_out = made(tmp_path, shelf, project)[0].manifest()["left_out"]
    assert left_out["packages"] == {"tilelang": rules.PACKAGES["tilelang"]}
    sizes = {row["pattern"]: row["size"] for row in left_out["files"]}
    assert sizes["vllm/third_party/deep_gemm/*"] == len(b"header")


def test_a_package_that_is_asked_for_by_name_is_not_left_out(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    assert "tilelang/__init__.py" in made(tmp_path, shelf, project, "--with", "tilelang")[1]


def test_the_manifest_describes_the_parts_the_packages_and_the_whole(
    tmp_path: Path, shelf: Shelf, project: Project
) -> None:
    report, files = made(tmp_path, shelf, project, "--part-size", "0.0003")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == json.loads(json.dumps(report.manifest()))
    assert len(manifest["parts"]) > 1
    assert max(part["size"] for part in manifest["parts"]) <= 300
    assert sum(part["size"] for part in manifest["parts"]) == manifest["archive"]["size"]
    assert manifest["files"] == {name: len(data) for name, data in files.items()}
    assert manifest["archive"]["unpacked"] == sum(manifest["files"].values())
    rows = {row["name"]: (row["version"], row["licence"], row["why"]) for row in manifest["packages"]}
    assert rows["fastapi"] == ("0.136", "MIT", "darts-server, vllm")
    assert rows["darts-server"] == ("1.2", "Apache-2.0", "asked for")


def test_the_table_ends_with_the_parts(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    report, _ = made(tmp_path, shelf, project, "--no-check")
    lines = report.table().splitlines()
    assert "| msgspec | 0.22 | 0.0 | vllm |" in lines
    assert lines[-2].startswith(f"| bundle.tar.xz.01 | 0.0 | {report.parts[0].sha256[:16]}")
    assert lines[-1].startswith("| in all, 0 MB unpacked | 0.0 | ")


def test_the_check_names_what_nothing_provides(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    report, _ = made(tmp_path, shelf, project)
    assert report.missing is not None
    sure = {item.module for item in report.missing if item.when is When.ALWAYS}
    assert "vllm.entrypoints.openai.api_server" in sure
    assert not sure & {"vllm", "msgspec", "torch"}
    assert report.broken
    assert "imported at start and provided by nobody: " in report.table()


def test_parts_of_an_earlier_bundle_are_removed_and_the_same_content_gives_the_same_parts(
    tmp_path: Path, shelf: Shelf, project: Project
) -> None:
    first, _ = made(tmp_path, shelf, project, "--part-size", "0.0005")
    again, _ = made(tmp_path, shelf, project)
    assert (first.archive, len(list((tmp_path / "out").glob("bundle.tar.xz.*")))) == (again.archive, len(again.parts))


def test_without_the_xz_program_it_is_compressed_all_the_same(
    tmp_path: Path, shelf: Shelf, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert made(tmp_path, shelf, project)[1]["vllm/_C.abi3.so"] == b"kernels"


def test_a_vllm_that_cannot_be_had_is_an_error(tmp_path: Path, shelf: Shelf, project: Project) -> None:
    with pytest.raises(NoCandidateError, match=r"vllm: no wheel for this target satisfies ==0\.25\.0"):
        pack(options(tmp_path, "--vllm", "0.25.0"), shelf, project)
