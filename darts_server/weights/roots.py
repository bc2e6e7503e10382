"""Paths that callers name: only those below the folder that the operator allowed."""

from pathlib import Path

from darts_server.exceptions import Forbidden, InvalidRequest

FIELD = "path"


def resolve_path(root: Path | None, path: str) -> tuple[Path, Path]:
    """Return the path that a caller means, relative to ``root`` or absolute, and the root to open it below.

    Nothing is opened: links and special files are refused by :mod:`darts_server.files`.

    Raises:
        Forbidden: there is no root.
        InvalidRequest: the path is outside.
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
    return resolved, root
