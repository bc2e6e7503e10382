from pathlib import Path

import pytest

from darts_client._io import write_atomically


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert list(path.iterdir()) == []
