from pathlib import Path

import pytest

from darts_client._io import write_atomically


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"old", b"new", b""):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []
