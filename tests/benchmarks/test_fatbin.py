"""Blanking device code that the target's GPU does not load."""

import pytest

from benchmarks.gpu.packing.fatbin import ENTRY, HEADER, MACHINE_CODE, PTX, blank, fat_binaries

MAGIC = 0xBA55ED50


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    header = ENTRY.pack(kind, 0x101, 64, len(code), architecture)
    return header + bytes(64 - len(header)) + code


def fat_binary(*entries: bytes) -> bytes:
    return HEADER.pack(MAGIC, 1, HEADER.size, sum(map(len, entries))) + b"".join(entries)


def test_only_the_code_of_the_architecture_stays_and_nothing_moves() -> None:
    a, b, c = b"A" * 24, b"B" * 40, b"C" * 8
    old = b"ELF...." + fat_binary(entry(MACHINE_CODE, 80, a), entry(MACHINE_CODE, 90, b), entry(PTX, 90, c)) + b"end"
    new = bytearray(old)
    assert blank(new, 90) == len(a) + len(c)
    assert bytes(new) == old.replace(a, bytes(len(a))).replace(c, bytes(len(c)))


@pytest.mark.parametrize(
    ("architecture", "kept"),
    [(75, b""), (80, b"c80"), (86, b"c80"), (89, b"c80c89"), (90, b"p80p89"), (120, b"p80p89")],
)
def test_machine_code_runs_on_later_gpus_of_its_generation_and_ptx_on_all_later_ones(
    architecture: int, kept: bytes
) -> None:
    codes = {b"p80": (PTX, 80), b"p89": (PTX, 89), b"c80": (MACHINE_CODE, 80), b"c89": (MACHINE_CODE, 89)}
    data = bytearray(fat_binary(*(entry(*what, code) for code, what in codes.items())))
    blank(data, architecture)
    assert b"".join(code for code in codes if code in data) == kept


def test_each_fat_binary_of_a_file_is_looked_at_for_itself() -> None:
    both = fat_binary(entry(MACHINE_CODE, 90, b"first"), entry(PTX, 80, b"dropped"))
    ptx = fat_binary(entry(PTX, 80, b"needed"))
    data = bytearray(both + b"between" + ptx)
    assert len(list(fat_binaries(data))) == 2
    blank(data, 90)
    assert b"first" in data
    assert b"needed" in data
    assert b"dropped" not in data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no magic",
        HEADER.pack(MAGIC, 1, HEADER.size, 0),
        HEADER.pack(MAGIC, 2, HEADER.size, 8) + b"whatever",
        HEADER.pack(MAGIC, 1, HEADER.size, 10_000) + bytes(100),
        fat_binary(entry(7, 90, b"unknown kind")),
        HEADER.pack(MAGIC, 1, HEADER.size, 64)[:9],
    ],
)
def test_what_only_looks_like_one_is_left_alone(data: bytes) -> None:
    copy = bytearray(data)
    assert blank(copy, 90) == 0
    assert copy == data
