"""Paths that callers name: only what is truly under the folder that the operator allowed."""

import stat
from pathlib import Path

from darts_server.exceptions import Forbidden, InvalidRequest

FIELD = "path"


def allowed(root: Path | None, path: str) -> Path:
    """The file or folder at ``path``, relative to ``root`` or absolute, with no symbolic link on the way from there.

    Raises:
        Forbidden: there is no root.
        InvalidRequest: it is outside, not there, or neither a regular file nor a folder of these.
    """
    if root is None:
        raise Forbidden("weights are read from no folder of this machine; start the server with --weights-root FOLDER")
    if not path or "\0" in path:
        raise InvalidRequest(FIELD, "must name a file or folder")
    named = Path(path)
    if ".." in named.parts:
        raise InvalidRequest(FIELD, "must not have '..' in it")
    if named.is_relative_to(root):
        named = named.relative_to(root)
    root = root.resolve()
    whole = named if named.is_absolute() else root / named
    if not whole.is_relative_to(root):
        raise InvalidRequest(FIELD, f"is outside {root}, the only folder that weights are read from")
    try:
        _refuse_links(root, whole)
        _refuse_devices(whole)
    except OSError as error:
        raise InvalidRequest(FIELD, f"{path} cannot be read: {error.strerror}") from error
    return whole


def _refuse_links(root: Path, whole: Path) -> None:
    below = root
    for part in whole.relative_to(root).parts:
        below /= part
        if below.is_symlink():
            raise InvalidRequest(FIELD, f"{below} is a symbolic link; name what it points to, under {root}")


def _refuse_devices(whole: Path) -> None:
    mode = whole.lstat().st_mode
    files = list(whole.iterdir()) if stat.S_ISDIR(mode) else [whole]
    for file in files:
        if file.suffix in (".safetensors", ".json") and not stat.S_ISREG(file.lstat().st_mode):
            raise InvalidRequest(FIELD, f"{file} is not a regular file")
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise InvalidRequest(FIELD, f"{whole} is neither a regular file nor a folder")
