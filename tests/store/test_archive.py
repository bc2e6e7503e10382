"""Which keys and documents can be stored, and the file format of exported state."""

import gzip
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.exceptions import InvalidRequest, StateDamaged, StateTooNew
from darts_server.store.archive import Row, Scalar, check_kind_and_key, encode, pack, unpack

LIMIT = 10**6
ROWS: list[Row] = [("dataset", "", '{"n":1}'), ("prompt", "a", "{}"), ("prompt", "ä 😀\0\n", '{"x":null,"y":"z"}')]
scalars: st.SearchStrategy[Scalar] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
names = st.tuples(st.sampled_from(["prompt", "singleton"]), st.text(max_size=9))


def signed(body: bytes, version: int = 1) -> bytes:
    return b"darts-state %d %s\n" % (version, hashlib.sha256(body).hexdigest().encode()) + body


def lines(*documents: object) -> bytes:
    return signed(gzip.compress(b"".join(json.dumps(document).encode() + b"\n" for document in documents)))


@given(st.dictionaries(names, st.dictionaries(st.text(max_size=9), scalars, max_size=4), max_size=9))
def test_unpack_returns_what_was_packed(documents: dict[tuple[str, str], dict[str, Scalar]]) -> None:
    rows = sorted((*name, encode(document)) for name, document in documents.items())
    data = pack(rows)
    assert list(unpack(data, LIMIT)) == rows
    assert pack(rows) == data


def test_an_archive_can_be_read_and_written_with_gzip_and_json() -> None:
    first, body = pack(ROWS).split(b"\n", 1)
    assert first == b"darts-state 1 " + hashlib.sha256(body).hexdigest().encode()
    assert [json.loads(line) for line in gzip.decompress(body).splitlines()][1] == ["prompt", "a", {}]
    assert list(unpack(lines(["prompt", "a", {"n": 1}]), LIMIT)) == [("prompt", "a", '{"n":1}')]


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    data = pack(ROWS)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((StateDamaged, StateTooNew)):
            list(unpack(bytes(changed), LIMIT))
    for size in range(len(data)):
        with pytest.raises(StateDamaged):
            list(unpack(data[:size], LIMIT))
    with pytest.raises(StateDamaged, match="checksum"):
        list(unpack(data + b"\0", LIMIT))


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_with_and_without_the_first_line(data: bytes) -> None:
    for whole in (data, signed(data) if data else b"", signed(gzip.compress(data + b"\n"))):
        with pytest.raises(StateDamaged):
            list(unpack(whole, LIMIT))


@pytest.mark.parametrize("version", [2, 999999999])
def test_a_newer_format_is_refused(version: int) -> None:
    with pytest.raises(StateTooNew, match=f"format {version}.*nothing was changed"):
        list(unpack(signed(b"whatever it will be", version), LIMIT))


@pytest.mark.parametrize(
    "line",
    [
        *({"prompt": 1}, ["prompt", "a"], ["prompt", "a", {}, 1], [1, "a", {}], ["prompt", 1, {}], ["prompt", "a", []]),
        *(["Not A Kind", "a", {}], ["prompt", "\ud800", {}], ["prompt", "a", {"n": float("nan")}]),
    ],
    ids=str,
)
def test_a_line_that_is_no_document_is_refused(line: object) -> None:
    with pytest.raises(StateDamaged, match="nothing was changed"):
        list(unpack(lines(["dataset", "", {}], line), LIMIT))


@pytest.mark.parametrize("keys", [["a", "a"], ["b", "a"]])
def test_duplicate_and_unordered_keys_are_refused(keys: list[str]) -> None:
    with pytest.raises(StateDamaged, match="twice or out of order"):
        list(unpack(lines(*(["prompt", key, {}] for key in keys)), LIMIT))


@pytest.mark.parametrize("unit", [b"\0", b"[", b"1", b'["prompt","a",{}]\n', b"\n"], ids=repr)
def test_a_gzip_bomb_is_refused_before_it_is_decompressed(unit: bytes) -> None:
    with pytest.raises(StateDamaged):
        list(unpack(signed(gzip.compress(unit * (5_000_000 // len(unit)), 1)), LIMIT))


def test_a_file_above_the_limit_is_refused() -> None:
    documents = [["prompt", f"{n:04}", {"n": n}] for n in range(100)]
    with pytest.raises(StateDamaged, match="more than 500 bytes"):
        list(unpack(lines(*documents), 500))


@pytest.mark.parametrize("key", ["\ud800", "x" * 65537, "\u00e4" * 32769], ids=["surrogate", "long", "long in UTF-8"])
def test_an_invalid_key_is_an_invalid_request(key: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt key"):
        check_kind_and_key("prompt", key)


@pytest.mark.parametrize(
    "document",
    [
        *({"a": {}}, {"a": [1]}, {1: 1}, {"a": b""}),
        *({"a": float("nan")}, {"a": float("-inf")}, {"a": "\ud800"}, {"a": "x" * 65536}),
    ],
    ids=lambda document: repr(document)[:12],
)
def test_a_document_must_be_flat_finite_well_formed_and_small(document: dict[str, float]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"JSON|surrogates"):
        encode(document)
