from pathlib import Path

import pytest

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.weights.roots import resolve_path
from darts_server.weights.tensors import read_tensors
from tests.weights.model import SHAPES, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "outside.safetensors", 1)
    write(tmp_path / "root" / "step-1" / "model.safetensors", 1)
    return tmp_path / "root"


def test_paths_under_the_root_are_allowed_relative_and_absolute(root: Path) -> None:
    file = root / "step-1" / "model.safetensors"
    assert resolve_path(root, "step-1/model.safetensors") == resolve_path(root, str(file)) == (file, root)
    assert resolve_path(root, "step-1") == (file.parent, root)


def test_without_a_root_no_path_is_allowed(root: Path) -> None:
    with pytest.raises(Forbidden, match="--weights-root"):
        resolve_path(None, str(root))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must name"),
        ("a\0b", "must name"),
        ("../outside.safetensors", "must not have"),
        ("step-1/../../outside.safetensors", "must not have"),
        ("/etc/passwd", "is outside"),
    ],
)
def test_paths_that_are_outside_are_refused(root: Path, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        resolve_path(root, path)
    assert error.value.field == "path"


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    for path in ("step-1", str(root / "step-1"), str(alias / "step-1")):
        resolved = resolve_path(alias, path)
        assert resolved == (root / "step-1", root)
        assert read_tensors(resolved[0], "path", resolved[1]).keys() == SHAPES.keys()
