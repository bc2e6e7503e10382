import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from darts_server.exceptions import DiskFull
from darts_server.weights.staging import BUFFER, Staging

pytestmark = pytest.mark.anyio


async def pieces(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


async def test_what_comes_is_written_and_removed_in_the_end(tmp_path: Path) -> None:
    with Staging(tmp_path) as staging:
        assert list(tmp_path.iterdir()) == []
        big = bytes(BUFFER + 1)
        path = await staging.write(pieces(b"a", big, b"", b"z"))
        assert path.read_bytes() == b"a" + big + b"z"
        assert await staging.write(pieces(b"b")) != path
    assert list(tmp_path.iterdir()) == []


async def test_what_is_not_kept_is_removed(tmp_path: Path) -> None:
    with Staging(tmp_path) as staging:
        staging.keep_only(set())
        paths = [await staging.write(pieces(b"a")) for _ in range(3)]
        staging.keep_only({paths[1], tmp_path / "elsewhere"})
        assert [path.exists() for path in paths] == [False, True, False]


@pytest.mark.parametrize("error", [ConnectionError("gone"), OSError(errno.EIO, "worn out")])
async def test_nothing_is_left_of_one_that_fails(tmp_path: Path, error: Exception) -> None:
    with Staging(tmp_path) as staging:
        with pytest.raises(type(error)):
            await staging.write(pieces(bytes(BUFFER), error=error))
        assert [path for folder in tmp_path.iterdir() for path in folder.iterdir()] == []


async def test_a_full_disk_is_told_of() -> None:
    """The device that is always full takes no file, so its error is what a writer gets."""
    with Staging() as staging:
        with pytest.raises(DiskFull, match="--weights-staging"):
            await staging.write(pieces(b"a", error=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"a")
