import os
from pathlib import Path

import pytest

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.weights.roots import resolve_path
from tests.weights.model import write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "outside.safetensors", 1)
    write(tmp_path / "root" / "step-1" / "model.safetensors", 1)
    return tmp_path / "root"


def test_paths_under_the_root_are_allowed_relative_and_absolute(root: Path) -> None:
    file = root / "step-1" / "model.safetensors"
    assert resolve_path(root, "step-1/model.safetensors") == resolve_path(root, str(file)) == file
    assert resolve_path(root, "step-1") == file.parent


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
        ("nothing", "cannot be read: No such file"),
        ("x" * 5000, "cannot be read: File name too long"),
    ],
)
def test_paths_that_are_outside_or_missing_are_refused(root: Path, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        resolve_path(root, path)
    assert error.value.field == "path"


def test_symbolic_links_are_refused_wherever_they_point(root: Path) -> None:
    (root / "link.safetensors").symlink_to(root.parent / "outside.safetensors")
    (root / "inner").symlink_to(root / "step-1")
    (root / "step-2").mkdir()
    (root / "step-2" / "model.safetensors").symlink_to(root.parent / "outside.safetensors")
    for path in ("link.safetensors", "inner", "inner/model.safetensors"):
        with pytest.raises(InvalidRequest, match="is a symbolic link"):
            resolve_path(root, path)
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        resolve_path(root, "step-2")


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    for path in ("step-1", str(root / "step-1"), str(root.parent / "alias" / "step-1")):
        assert resolve_path(root.parent / "alias", path) == root / "step-1"


def test_devices_and_pipes_are_refused(root: Path) -> None:
    os.mkfifo(root / "pipe.safetensors")
    os.mkfifo(root / "pipe")
    for path in ("pipe.safetensors", "pipe"):
        with pytest.raises(InvalidRequest, match="regular file"):
            resolve_path(root, path)
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        resolve_path(root, ".")
    with pytest.raises(InvalidRequest, match="regular file"):
        resolve_path(Path("/dev"), "null")
