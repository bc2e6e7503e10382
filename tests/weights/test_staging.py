import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from darts_server.exceptions import DiskFull
from darts_server.weights.staging import BUFFER_BYTES, Staging

pytestmark = pytest.mark.anyio


async def pieces(*chunks: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if error is not None:
        raise error


async def test_files_are_written_and_removed_at_exit(tmp_path: Path) -> None:
    with Staging(tmp_path) as staging:
        assert list(tmp_path.iterdir()) == []
        big = bytes(BUFFER_BYTES + 1)
        path = await staging.write(pieces(b"a", big, b"", b"z"))
        assert path.read_bytes() == b"a" + big + b"z"
        assert await staging.write(pieces(b"b")) != path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [ConnectionError("gone"), OSError(errno.EIO, "worn out")])
async def test_a_failed_write_leaves_no_file(tmp_path: Path, error: Exception) -> None:
    with Staging(tmp_path) as staging:
        with pytest.raises(type(error)):
            await staging.write(pieces(bytes(BUFFER_BYTES), error=error))
        assert [path for folder in tmp_path.iterdir() for path in folder.glob("*.safetensors")] == []


async def test_a_full_disk_is_reported_with_the_flag() -> None:
    with Staging() as staging, pytest.raises(DiskFull, match="--weights-staging"):
        await staging.write(pieces(b"a", error=OSError(errno.ENOSPC, "No space left on device")))


KILLED = """
import asyncio, sys, time
from pathlib import Path
from darts_server.weights.staging import Staging

async def bytes_of(data):
    yield data

staging = Staging(Path(sys.argv[1]))
asyncio.run(staging.write(bytes_of(b"weights")))
print("staged", flush=True)
time.sleep(60)
"""


def staged(folder: Path) -> list[Path]:
    return list(folder.glob("darts-weights-*/*.safetensors"))


def test_the_folder_of_a_killed_process_is_removed_at_the_next_start_and_that_of_a_running_one_is_not(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == b"staged\n"
        with Staging(tmp_path):
            assert len(staged(tmp_path)) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(staged(tmp_path)) == 1
    with Staging(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "darts-weights-other").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "darts-weights-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "darts-weights-file").touch()
    with Staging(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "elsewhere" / "lock").exists()
