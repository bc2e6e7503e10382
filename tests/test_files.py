import os
import threading
from pathlib import Path

import pytest

from darts_server.files import list_folder, open_file, open_unchanged, path_of, read_file, stamp_of

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("inside")
    (tmp_path / "outside").write_text("outside")
    return root


def read(path: Path, root: Path | None = None) -> str:
    return read_file(path, 100, root).decode()


def test_files_below_the_root_are_read_and_listed(root: Path) -> None:
    assert read(root / "a" / "b" / "file", root) == read(root / "a" / "b" / "file") == "inside"
    assert list_folder(root / "a" / "b", root) == ["file"]
    assert list_folder(root, root) == ["a"]
    assert list_folder(root / "a" / "b" / "file", root) is None
    assert read_file(root / "a" / "b" / "file", 6) == b"inside"
    with pytest.raises(OSError, match="has more than 5 bytes"):
        read_file(root / "a" / "b" / "file", 5, root)


def test_the_root_may_be_a_link_but_no_component_below_it(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert read(alias / "a" / "b" / "file", alias) == "inside"
    (root / "link").symlink_to(root / "a")
    (root / "a" / "link").symlink_to(root.parent / "outside")
    (root / "dangling").symlink_to(root / "nothing")
    for path in ("link", "link/b/file", "a/link", "dangling"):
        with pytest.raises(OSError, match="is a symbolic link; give the path that it points to") as error:
            open_file(root / path, root)
        assert error.value.filename == str(root / path)
        with pytest.raises(OSError, match="is a symbolic link"):
            list_folder(root / path, root)
    assert read(root / "a" / "link") == "outside"  # a path of the operator


def test_dots_and_other_roots_are_refused(root: Path) -> None:
    for path in (root / "a" / ".." / ".." / "outside", root.parent / "outside"):
        with pytest.raises(ValueError, match=r"\.\.|not in the subpath"):
            open_file(path, root)


def test_the_error_of_an_unusable_path_names_the_path(root: Path) -> None:
    for path, message in (("a/c", "No such file"), ("a/b/file/x", "Not a directory"), ("x" * 300, "too long")):
        with pytest.raises(OSError, match=message) as error:
            open_file(root / path, root)
        assert error.value.filename == str(root / path)


def test_only_regular_files_are_opened_without_blocking(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for below in (root, None):
        for read_or_list in (open_file, list_folder):
            with pytest.raises(OSError, match="is not a regular file"):
                read_or_list(root / "pipe", below)
        with pytest.raises(IsADirectoryError, match="is a folder"):
            open_file(root / "a", below)
    with pytest.raises(OSError, match="is not a regular file"):
        open_file(Path("/dev/zero"))


def test_a_file_is_opened_again_only_if_it_is_unchanged(root: Path) -> None:
    file = root / "a" / "b" / "file"
    stamp = stamp_of(file)
    with open_unchanged(file, stamp) as opened:
        assert stamp_of(opened) == stamp
        assert Path(path_of(opened)).read_text() == "inside"
        (root / "new").write_text("inside")
        (root / "new").rename(file)
        assert Path(path_of(opened)).read_text() == "inside"
    with pytest.raises(OSError, match="has changed since it was checked"):
        open_unchanged(file, stamp)


def test_on_another_machine_the_file_has_other_numbers_and_the_same_size(root: Path) -> None:
    file = root / "a" / "b" / "file"
    stamp = stamp_of(file)._replace(place="another", device=1, inode=2, changed=3)
    open_unchanged(file, stamp).close()
    for other in (stamp._replace(size=1), stamp._replace(place=stamp_of(file).place)):
        with pytest.raises(OSError, match="has changed since it was checked"):
            open_unchanged(file, other)


def test_a_folder_that_is_replaced_by_a_link_during_a_read_is_not_followed(root: Path) -> None:
    """Another process exchanges a folder and a link to one outside, as fast as it can."""
    outside = root.parent / "elsewhere"
    outside.mkdir()
    (outside / "file").write_text("outside")
    (root / "x").mkdir()
    (root / "x" / "file").write_text("inside")
    (root / "y").symlink_to(outside)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            for one, two in (("x", "tmp"), ("y", "x"), ("tmp", "y")):
                (root / one).rename(root / two)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        found = set()
        for _ in range(2000):
            try:
                found.add(read(root / "x" / "file", root))
            except OSError:
                found.add("refused")
    finally:
        stop.set()
        thread.join()
    assert found <= {"inside", "refused"}


def test_no_descriptor_is_left_open(root: Path) -> None:
    os.mkfifo(root / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a/b/file", "a", "pipe", "nothing", "a/b/file/x"):
        for read_or_list in (open_file, list_folder):
            try:
                opened = read_or_list(root / path, root)
            except OSError:
                continue
            if not isinstance(opened, list | None):
                opened.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer if some of earlier tests were collected meanwhile
