"""The archive's parts, and how wheels are laid out before."""

from email.parser import HeaderParser
from pathlib import Path

import pytest

from benchmarks.gpu.packing import archive
from benchmarks.gpu.packing.bundle import Bundle
from benchmarks.gpu.packing.bundle import licence as stated
from tests.benchmarks.shelf import Shelf
from tests.benchmarks.test_fatbin import entry, fat_binary


@pytest.mark.parametrize("sizes", [[7], [3, 3, 1], [1] * 9, [10, 0, 5], [6], []])
def test_no_part_is_larger_than_the_limit_however_it_is_written(tmp_path: Path, sizes: list[int]) -> None:
    splitter, data = archive.Splitter(tmp_path, 3), bytes(range(sum(sizes)))
    for start, size in zip((sum(sizes[:i]) for i in range(len(sizes))), sizes, strict=True):
        splitter.write(data[start : start + size])
    parts = [(tmp_path / part.name).read_bytes() for part in splitter.parts()]
    assert parts == [data[i : i + 3] for i in range(0, len(data), 3)]


def test_a_wheel_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    wheel = Shelf(tmp_path).put("bad", "1", files={"bad/../../x": b""})
    with pytest.raises(ValueError, match="outside of its folder"):
        Bundle(tmp_path / "out", ()).add_wheel(wheel)


@pytest.mark.parametrize(
    ("lines", "licence"),
    [
        ("License-Expression: MIT\nLicense: other", "MIT"),
        (
            "License: Apache 2\nClassifier: License :: OSI Approved :: Apache Software License",
            "Apache Software License",
        ),
        ("License: BSD\n   and more", "BSD"),
        ("License: ISC\nClassifier: License :: OSI Approved", "ISC"),
        ("Summary: none", "not stated"),
    ],
)
def test_licences_are_read_off_the_metadata(lines: str, licence: str) -> None:
    assert stated(HeaderParser().parsestr(f"Name: x\n{lines}\n\n")) == licence


@pytest.mark.parametrize(("architecture", "kept"), [(None, 2), (90, 1)])
def test_device_code_for_other_gpus_is_blanked_if_asked_for(
    tmp_path: Path, architecture: int | None, kept: int
) -> None:
    module = fat_binary(entry(2, 80, b"code"), entry(2, 90, b"code"))
    wheel = Shelf(tmp_path).put("vllm", "1", files={"vllm/_C.so": module, "vllm/data": module})
    bundle = Bundle(tmp_path / "out", (), architecture=architecture)
    bundle.add_wheel(wheel)
    laid_out = (tmp_path / "out" / "vllm" / "_C.so").read_bytes()
    assert (laid_out.count(b"code"), len(laid_out)) == (kept, len(module))
    assert (tmp_path / "out" / "vllm" / "data").read_bytes() == module
    assert ("vllm/_C.so" in bundle.changed) == (architecture is not None)
