"""Open regular files that other users may write, without blocking, and without links out of a root."""

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
    """Identifies a file and its state."""

    place: str
    """Machine and mount namespace, which all processes of a container share."""
    device: int
    inode: int
    size: int
    changed: int
    """Time of the last change in nanoseconds."""

    def matches(self, other: "Stamp") -> bool:
        if self.place == other.place:
            return self == other
        # Another machine has a mount of its own, or a copy, so only the size can be compared.
        return self.size == other.size


def open_file(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a regular file for reading.

    ``root``: a folder above ``path``. No component between the two may be a symbolic link, even if it is replaced
    meanwhile. Without a root, links are followed, for paths of the operator.

    Raises:
        OSError: ``strerror`` names the mistake.
    """
    descriptor = _open_file_or_folder(path, root)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
    return os.fdopen(descriptor, "rb")


def open_unchanged(path: Path, stamp: Stamp) -> BinaryIO:
    """Open the file that had this stamp, perhaps on another machine.

    Raises:
        OSError: the file is gone, or was changed or replaced.
    """
    file = open_file(path)
    if not stamp_of(file).matches(stamp):
        file.close()
        raise OSError(errno.ESTALE, "has changed since it was checked", str(path))
    return file


def read_file(path: Path, max_bytes: int, root: Path | None = None) -> bytes:
    """Read a whole regular file; see `open_file`.

    Raises:
        OSError: also if the file has more than ``max_bytes``.
    """
    with open_file(path, root) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return content


def list_folder(path: Path, root: Path | None) -> list[str] | None:
    """Return the names in a folder, in any order, or None for a regular file.

    Raises:
        OSError: ``path`` is neither a folder nor a regular file.
    """
    descriptor = _open_file_or_folder(path, root)
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        return os.listdir(descriptor) if is_folder else None
    finally:
        os.close(descriptor)


def stamp_of(file: BinaryIO | Path) -> Stamp:
    status = os.stat(file) if isinstance(file, Path) else os.fstat(file.fileno())
    return Stamp(_machine_and_mounts(), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def path_of(file: BinaryIO) -> str:
    """Return a path to an open file, for libraries that open files themselves."""
    return f"/proc/self/fd/{file.fileno()}"


@cache
def _machine_and_mounts() -> str:
    mount_namespace = ""
    with suppress(OSError):
        mount_namespace = os.readlink("/proc/self/ns/mnt")
    return f"{socket.gethostname()} {mount_namespace}"


def _open_file_or_folder(path: Path, root: Path | None) -> int:
    try:
        descriptor = os.open(path, _READ) if root is None else _open_below(root, path.relative_to(root).parts)
    except OSError as error:
        # The error of `_open_below` names only the component.
        error.filename = str(path)
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def _open_below(root: Path, components: tuple[str, ...]) -> int:
    if ".." in components:
        raise ValueError(f"must not have '..' in it: {components}")
    components = components or (".",)
    descriptor = os.open(root, _FOLDER)
    # Each component is opened relative to its parent's descriptor, so that no parent can be replaced meanwhile.
    for number, name in enumerate(components, 1):
        parent = descriptor
        flags = _READ if number == len(components) else _FOLDER
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            # With O_DIRECTORY a link gives ENOTDIR in place of ELOOP.
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    message = f"{name} is a symbolic link; give the path that it points to"
                    raise OSError(errno.ELOOP, message) from error
            raise
        finally:
            os.close(parent)
    return descriptor
