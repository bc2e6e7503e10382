"""The scan for imports that nobody provides, on packages made up here."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.gpu.packing.imports import Scan, When


def missing(folder: Path, files: Mapping[str, str], *roots: str, installed: str = "") -> list[tuple[str, str, str]]:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    found = Scan(folder, installed.split()).missing(roots or ("pkg",))
    return [(item.when.name, item.module, item.by) for item in found]


def test_what_the_folder_the_target_or_python_has_is_not_missing(tmp_path: Path) -> None:
    source = "import json\nimport torch.nn\nfrom pkg import other, _C\nfrom . import other\nimport google.rpc\n"
    files = {"pkg/__init__.py": source, "pkg/other.py": "", "pkg/_C.abi3.so": "", "google/rpc/__init__.py": ""}
    assert missing(tmp_path, files, installed="torch google") == []


@pytest.mark.parametrize(
    ("source", "when"),
    [
        ("import gone", When.ALWAYS),
        ("import gone.deep as g", When.ALWAYS),
        ("from gone import name", When.ALWAYS),
        ("class A:\n    import gone", When.ALWAYS),
        ("with open('x'):\n    import gone", When.ALWAYS),
        ("try:\n    import gone\nfinally:\n    pass", When.ALWAYS),
        ("try:\n    import gone\nexcept KeyError:\n    pass", When.ALWAYS),
        ("if on_gpu():\n    import gone", When.UNDER_A_CONDITION),
        ("try:\n    import json\nexcept ImportError:\n    import gone", When.UNDER_A_CONDITION),
        ("from typing import TYPE_CHECKING\ngone = LazyLoader('g', globals(), 'gone')", When.UNDER_A_CONDITION),
        ("try:\n    import gone\nexcept (OSError, ImportError):\n    pass", When.TRIED),
        ("try:\n    import gone\nexcept:\n    pass", When.TRIED),
        ("import contextlib\nwith contextlib.suppress(ImportError):\n    import gone", When.TRIED),
        ("def f():\n    import gone", When.LATER),
        ("class A:\n    async def f(self):\n        import gone", When.LATER),
    ],
)
def test_how_surely_an_import_is_reached(tmp_path: Path, source: str, when: When) -> None:
    assert [kind for kind, _, _ in missing(tmp_path, {"pkg/__init__.py": source})] == [when.name]


def test_imports_for_type_checkers_do_not_count(tmp_path: Path) -> None:
    source = "import typing\nif typing.TYPE_CHECKING:\n    import gone\nelse:\n    import lost\n"
    assert missing(tmp_path, {"pkg/__init__.py": source}) == [("ALWAYS", "lost", "pkg")]


def test_imports_are_followed_through_the_folder_and_a_failure_counts_as_its_surest_path(tmp_path: Path) -> None:
    files = {
        "pkg/__init__.py": "try:\n    from . import a\nexcept ImportError:\n    pass\nfrom .sub import b\n",
        "pkg/a.py": "import gone_a",
        "pkg/sub/__init__.py": "from ..c import name",
        "pkg/sub/b.py": "def f():\n    from .. import never\n",
        "pkg/c.py": "import gone_c",
        "pkg/never.py": "import gone_never",
    }
    assert missing(tmp_path, files) == [("ALWAYS", "gone_c", "pkg.c"), ("TRIED", "gone_a", "pkg.a")]


def test_parents_are_imported_too_and_a_missing_module_of_a_bundled_package_is_found(tmp_path: Path) -> None:
    files = {"pkg/__init__.py": "import gone", "pkg/a.py": "from pkg.moved.away import f"}
    assert missing(tmp_path, files, "pkg.a", "pkg.no_root") == [
        ("ALWAYS", "gone", "pkg"),
        ("ALWAYS", "pkg.moved.away", "pkg.a"),
        ("ALWAYS", "pkg.no_root", "asked for"),
    ]


def test_a_module_that_python_no_longer_has_is_missing(tmp_path: Path) -> None:
    assert missing(tmp_path, {"pkg/__init__.py": "import distutils"}) == [("ALWAYS", "distutils", "pkg")]


def test_a_file_with_syntax_of_another_python_is_passed_over(tmp_path: Path) -> None:
    assert missing(tmp_path, {"pkg/__init__.py": "import gone\n<html>"}) == []
