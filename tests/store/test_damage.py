"""A damaged state file fails the start with our errors only, and is not changed."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from darts_server.exceptions import StateError
from darts_server.store import Store
from darts_server.store.archive import Scalar
from darts_server.store.store import FILE_NAME
from tests.store.children import start
from tests.store.reading import saved_documents

DOCUMENTS: dict[str, dict[str, Scalar]] = {f"{n:032}": {"number": n, "mean": n / 7} for n in range(50)}


class File(NamedTuple):
    """A state file with a short representation for hypothesis."""

    data: bytes
    log: bytes = b""

    def __repr__(self) -> str:
        return f"<{len(self.data)} bytes, log {len(self.log)} bytes>"


@pytest.fixture(scope="module")
def whole() -> File:
    with TemporaryDirectory() as folder:
        with Store(Path(folder)) as store:
            for key, document in DOCUMENTS.items():
                store.put("prompt", key, document)
            store.put("prompt", "large", {"text": "x" * 9000})
        return File((Path(folder) / FILE_NAME).read_bytes())


@pytest.fixture(scope="module")
def killed() -> File:
    """Database and log of a process that was killed."""
    with TemporaryDirectory() as folder, start("die_with_a_log", Path(folder)) as child:
        child.communicate(timeout=120)
        return File((Path(folder) / FILE_NAME).read_bytes(), (Path(folder) / f"{FILE_NAME}-wal").read_bytes())


def opened(data: bytes, log: bytes = b"") -> dict[str, dict[str, Scalar]] | None:
    """Documents of the file, or None if it was refused: then the file is unchanged, and the message names it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / FILE_NAME
        path.write_bytes(data)
        if log:
            Path(f"{path}-wal").write_bytes(log)
        try:
            with Store(Path(folder)) as store:
                return saved_documents(store, "prompt")
        except StateError as error:
            message = str(error)
        assert str(path) in message
        assert path.read_bytes() == data
        assert not log or Path(f"{path}-wal").read_bytes() == log
        return None


def flipped(data: bytes, bits: list[int]) -> bytes:
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


@given(data=st.binary(max_size=2000), begins_like_one=st.booleans())
def test_random_bytes_are_refused(data: bytes, begins_like_one: bool) -> None:
    assert opened(b"SQLite format 3\0" + data if begins_like_one else data) is None


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(whole: File, share: float) -> None:
    assert opened(whole.data[: int(len(whole.data) * share)]) is None


@given(bits=st.lists(st.integers(0, 2**20), min_size=1, max_size=4), where=st.sampled_from([100, 4096, 2**20]))
# A bit in the last letter of the schema makes SQLite's message invalid UTF-8.
@example(bits=[8 * 4096 - 1], where=4096)
def test_flipped_bits_are_refused_or_harmless(whole: File, bits: list[int], where: int) -> None:
    documents = opened(flipped(whole.data, [bit % (8 * where) for bit in bits]))
    assert documents is None or documents == {**DOCUMENTS, "large": {"text": "x" * 9000}}


@pytest.mark.parametrize("byte", [18, 39], ids=["version for writers", "free pages"])
def test_a_header_that_fails_only_writers_is_refused(whole: File, byte: int) -> None:
    assert opened(flipped(whole.data, [8 * byte + 2])) is None


@given(bits=st.lists(st.integers(0, 2**22), max_size=3), share=st.floats(0, 1))
def test_a_damaged_log_yields_what_was_committed_before_the_damage(killed: File, bits: list[int], share: float) -> None:
    data, log = killed
    documents = opened(data, flipped(log, bits)[: int(len(log) * share)])
    assert documents is not None
    assert documents == dict(list(DOCUMENTS.items())[: len(documents)])


def test_the_log_of_a_killed_process_is_read(killed: File) -> None:
    assert opened(*killed) == DOCUMENTS
