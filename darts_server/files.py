"""Open files that others may write: only regular ones, without waiting, and without following links out of a root."""

import errno
import os
import socket
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

# Without O_NONBLOCK a pipe that has no writer blocks open(2) for ever.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class Stamp(NamedTuple):
    """Which state of which file it is. ``place``: see `_place`. ``size``: in bytes. ``changed``: when, in ns."""

    place: str
    device: int
    inode: int
    size: int
    changed: int

    def fits(self, other: "Stamp") -> bool:
        """Whether it may be the same state. Numbers of devices and inodes, and times of copies, mean nothing elsewhere.

        A worker on another machine sees the file through a mount of its own, or has a copy.
        """
        return self == other if self.place == other.place else self.size == other.size


def open_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a regular file for reading. A pipe, device or folder is refused.

    ``root``: folder above ``path`` that the file must truly be below: no component between them may be a symbolic link,
    whoever replaces one meanwhile. The root itself may be a link. ``None``, for paths of the operator: links are
    followed.

    Raises:
        OSError: its ``strerror`` says what is wrong.
    """
    descriptor = _open(path, root)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    return os.fdopen(descriptor, "rb")


def open_unchanged(path: Path, stamp: Stamp) -> BinaryIO:
    """Open the regular file that had this stamp, perhaps on another machine.

    Raises:
        OSError: it is gone, or another or a changed file has taken its place.
    """
    file = open_file(path)
    if not stamp_of(file).fits(stamp):
        file.close()
        raise OSError(errno.ESTALE, "has changed since it was checked", str(path))
    return file


def read_file(path: Path, max_bytes: int, root: Path | None = None) -> bytes:
    """Read a whole regular file; see `open_file`.

    Raises:
        OSError: also if it has more than ``max_bytes``.
    """
    with open_file(path, root) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return content


def list_folder(path: Path, root: Path | None) -> list[str] | None:
    """Return the names in a folder, in any order; ``None`` for a regular file. ``root``: see `open_file`.

    Raises:
        OSError: ``path`` is neither.
    """
    descriptor = _open(path, root)
    try:
        return os.listdir(descriptor) if stat.S_ISDIR(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def stamp_of(file: BinaryIO | Path) -> Stamp:
    """Return the stamp of an open file, or of the file that a path leads to.

    Raises:
        OSError
    """
    status = os.stat(file) if isinstance(file, Path) else os.fstat(file.fileno())
    return Stamp(_place(), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def path_of(file: BinaryIO) -> str:
    """Return a path that leads to this open file in this process, for libraries that open files themselves."""
    return f"/proc/self/fd/{file.fileno()}"


@cache
def _place() -> str:
    """Name the machine and the mounts of this process. Processes of one server's container have the same."""
    mounts = ""
    with suppress(OSError):
        mounts = os.readlink("/proc/self/ns/mnt")
    return f"{socket.gethostname()} {mounts}"


def _open(path: Path, root: Path | None) -> int:
    """Open a regular file or a folder, and return its descriptor."""
    try:
        descriptor = os.open(path, _READ) if root is None else _open_below(root, path.relative_to(root).parts)
    except OSError as error:
        error.filename = str(path)  # also where a component was opened
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def _open_below(root: Path, parts: tuple[str, ...]) -> int:
    """Open the root and then each component in the one before it, so that nothing can be exchanged between them."""
    if ".." in parts:
        raise ValueError(f"must not have '..' in it: {parts}")
    names = parts or (".",)
    opened = os.open(root, _FOLDER)
    for number, name in enumerate(names, 1):
        folder = opened
        try:
            opened = os.open(name, (_READ if number == len(names) else _FOLDER) | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            # ENOTDIR where a folder was expected
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and stat.S_ISLNK(
                os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            ):
                raise OSError(errno.ELOOP, f"{name} is a symbolic link; name what it points to") from error
            raise
        finally:
            os.close(folder)
    return opened
