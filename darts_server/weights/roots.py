"""Paths that callers name: only those that are truly under the folder that the operator allowed."""

import stat
from pathlib import Path

from darts_server.exceptions import Forbidden, InvalidRequest

FIELD = "path"


def resolve_path(root: Path | None, path: str) -> Path:
    """Return the file or folder at ``path``, relative to ``root`` or absolute, with no symbolic link below ``root``.

    Raises:
        Forbidden: there is no root.
        InvalidRequest: the path is outside, does not exist, or is neither a regular file nor a folder of these.
    """
    if root is None:
        raise Forbidden("weights are read from no folder of this machine; start the server with --weights-root FOLDER")
    if not path or "\0" in path:
        raise InvalidRequest(FIELD, "must name a file or folder")
    given = Path(path)
    if ".." in given.parts:
        raise InvalidRequest(FIELD, "must not have '..' in it")
    if given.is_relative_to(root):
        given = given.relative_to(root)
    root = root.resolve()
    resolved = given if given.is_absolute() else root / given
    if not resolved.is_relative_to(root):
        raise InvalidRequest(FIELD, f"is outside {root}, the only folder that weights are read from")
    try:
        _refuse_links(root, resolved)
        _refuse_devices(resolved)
    except OSError as error:
        raise InvalidRequest(FIELD, f"{path} cannot be read: {error.strerror}") from error
    return resolved


def _refuse_links(root: Path, path: Path) -> None:
    current = root
    for part in path.relative_to(root).parts:
        current /= part
        if current.is_symlink():
            raise InvalidRequest(FIELD, f"{current} is a symbolic link; name what it points to, under {root}")


def _refuse_devices(path: Path) -> None:
    # Reading a pipe or a device would block the server for ever.
    mode = path.lstat().st_mode
    files = list(path.iterdir()) if stat.S_ISDIR(mode) else [path]
    for file in files:
        if file.suffix in (".safetensors", ".json") and not stat.S_ISREG(file.lstat().st_mode):
            raise InvalidRequest(FIELD, f"{file} is not a regular file")
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise InvalidRequest(FIELD, f"{path} is neither a regular file nor a folder")
