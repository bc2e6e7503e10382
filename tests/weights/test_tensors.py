import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.weights.tensors import (
    CHUNK_BYTES,
    NONFINITE,
    ExpectedTensors,
    Tensor,
    check_numbers,
    check_tensors,
    read_tensors,
    resolve_path,
)
from tests.weights.model import SHAPES, TIED, tensors, write

EXPECTED = ExpectedTensors({name: Tensor(shape, "F32") for name, shape in SHAPES.items()}, TIED)


def checked(folder: Path, given: dict[str, np.ndarray], *, partial: bool = False) -> list[str]:
    save_file(given, folder / "given.safetensors")
    return sorted(
        check_tensors(EXPECTED, read_tensors(folder / "given.safetensors", "body"), partial=partial, field="body")
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_full_set_is_accepted_also_with_floats_of_another_precision(tmp_path: Path, dtype: type) -> None:
    assert checked(tmp_path, {n: t.astype(dtype) for n, t in tensors(1).items()}) == sorted(SHAPES)


def test_a_tied_tensor_is_accepted_only_if_it_equals_its_twin(tmp_path: Path) -> None:
    twins = tensors(1, **{"lm_head.weight": (4, 2)})
    assert checked(tmp_path, twins) == sorted(SHAPES)
    twins["lm_head.weight"][3, 1] = 2
    with pytest.raises(InvalidRequest, match=r"tensor lm_head\.weight differs from embed_tokens\.weight"):
        checked(tmp_path, twins)
    del twins["embed_tokens.weight"]
    with pytest.raises(InvalidRequest, match=r"send it as embed_tokens\.weight"):
        checked(tmp_path, twins, partial=True)


def test_a_tensor_that_does_not_fit_is_named_with_what_the_model_has(tmp_path: Path) -> None:
    good = tensors(1)
    for bad, message in (
        (good | {"layers.1.weight": np.zeros((2, 3), np.float32)}, r"layers.1.weight is F32 of shape \[2, 3\]"),
        (good | {"layers.1.weight": np.zeros((4,), np.float32)}, r"and the model's is F32 of shape \[2, 2\]"),
        (good | {"layers.1.weight": np.zeros((2, 2), np.int32)}, r"layers.1.weight is I32"),
        (good | {"layers.2.weight": np.zeros((2, 2), np.float32)}, "layers.2.weight is not one of the model's"),
        ({"layers.1.weight": good["layers.1.weight"]}, "tensor embed_tokens.weight is missing, and 1 more"),
    ):
        with pytest.raises(InvalidRequest, match=message) as error:
            checked(tmp_path, bad)
        assert error.value.field == "body"


def test_a_partial_set_needs_at_least_one_tensor(tmp_path: Path) -> None:
    assert checked(tmp_path, {"layers.1.weight": tensors(1)["layers.1.weight"]}, partial=True) == ["layers.1.weight"]
    with pytest.raises(InvalidRequest, match="no tensor"):
        checked(tmp_path, {}, partial=True)


@pytest.mark.parametrize("left", [0, 4, 8, 60, -1])
@pytest.mark.parametrize("junk", [None, b"junk" * 100, b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_truncated_or_in_another_format_is_refused(
    tmp_path: Path, left: int, junk: bytes | None
) -> None:
    path = write(tmp_path / "cut.safetensors", 1)
    path.write_bytes((junk or path.read_bytes())[:left])
    with pytest.raises(InvalidRequest, match="not a whole safetensors file"):
        read_tensors(path, "body")


def test_a_folder_is_read_by_its_index_or_completely(tmp_path: Path) -> None:
    first, *others = SHAPES
    write(tmp_path / "a.safetensors", 1, first)
    write(tmp_path / "b.safetensors", 1, *others)
    assert read_tensors(tmp_path, "path").keys() == SHAPES.keys()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(others, "b.safetensors")}))
    assert read_tensors(tmp_path, "path").keys() == set(others)


def test_an_inconsistent_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no \*.safetensors file"):
        read_tensors(tmp_path, "path")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_tensors(tmp_path / "nowhere", "path")
    write(tmp_path / "a.safetensors", 1)
    write(tmp_path / "b.safetensors", 1)
    with pytest.raises(InvalidRequest, match=r"is in a\.safetensors and in b\.safetensors"):
        read_tensors(tmp_path, "path")
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ("{", "no index"),
        ("[]", "no index"),
        ('{"weight_map": {"a": 1}}', "no index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": "/a.safetensors"}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": "..safetensors/../a.safetensors"}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": "a\\u0000.safetensors"}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": "a.bin"}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": ""}}', "only .*safetensors files in its folder"),
        ('{"weight_map": {"a": "c.safetensors"}}', "cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(InvalidRequest, match=message):
            read_tensors(tmp_path, "path")


def test_links_out_of_the_root_are_refused_wherever_they_are(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside" / "a.safetensors", 1)
    root = tmp_path / "root"
    write(root / "good" / "a.safetensors", 1)
    (root / "file.safetensors").symlink_to(outside)
    (root / "folder").symlink_to(outside.parent)
    (root / "step").mkdir()
    (root / "step" / "a.safetensors").symlink_to(outside)
    (root / "indexed").mkdir()
    (root / "indexed" / "b.safetensors").symlink_to(outside)
    (root / "indexed" / "x.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    (root / "linked").mkdir()
    (root / "linked" / "x.safetensors.index.json").symlink_to(root / "indexed" / "x.safetensors.index.json")
    assert read_tensors(root / "good", "path", root).keys() == SHAPES.keys()
    for name in ("file.safetensors", "folder", "folder/a.safetensors", "step", "indexed", "linked"):
        with pytest.raises(InvalidRequest, match="is a symbolic link; give the path that it points to") as error:
            read_tensors(root / name, "path", root)
        assert error.value.field == "path"
    assert read_tensors(root / "folder", "checkpoint").keys() == SHAPES.keys()


@pytest.mark.timeout(20)
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "step").mkdir()
    os.mkfifo(tmp_path / "step" / "a.safetensors")
    (tmp_path / "indexed").mkdir()
    os.mkfifo(tmp_path / "indexed" / "a.safetensors.index.json")
    for name in ("pipe", "step", "indexed"):
        for root in (tmp_path, None):
            with pytest.raises(InvalidRequest, match="is not a regular file"):
                read_tensors(tmp_path / name, "path", root)
    with pytest.raises(InvalidRequest, match="is not a regular file"):
        read_tensors(Path("/dev/null"), "path", Path("/dev"))


def test_a_tied_file_that_changes_while_it_is_compared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twins.safetensors"
    save_file(tensors(1, **{"lm_head.weight": (4, 2)}), path)
    given = read_tensors(path, "path")
    os.utime(path, (1, 1))
    with pytest.raises(InvalidRequest, match="has changed since it was checked"):
        check_tensors(EXPECTED, given, partial=False, field="path")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "outside.safetensors", 1)
    write(tmp_path / "root" / "step-1" / "model.safetensors", 1)
    return tmp_path / "root"


def test_paths_under_the_root_are_allowed_relative_and_absolute(root: Path) -> None:
    file = root / "step-1" / "model.safetensors"
    assert resolve_path(root, "step-1/model.safetensors") == resolve_path(root, str(file)) == (file, root)
    assert resolve_path(root, "step-1") == (file.parent, root)
    with pytest.raises(Forbidden, match="--weights-root"):
        resolve_path(None, str(root))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must name"),
        ("a\0b", "must name"),
        ("../outside.safetensors", "must not have"),
        ("step-1/../../outside.safetensors", "must not have"),
        ("/etc/passwd", "is outside"),
    ],
)
def test_paths_that_are_outside_are_refused(root: Path, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        resolve_path(root, path)
    assert error.value.field == "path"


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    for path in ("step-1", str(root / "step-1"), str(alias / "step-1")):
        resolved = resolve_path(alias, path)
        assert resolved == (root / "step-1", root)
        assert read_tensors(resolved[0], "path", resolved[1]).keys() == SHAPES.keys()


def with_bits(bits: int, dtype: str, place: int) -> bytes:
    """Return a safetensors file with the tensor `a`: finite numbers of both signs, and one with these bits."""
    size, first = NONFINITE[dtype]
    largest = first - 1
    sign = 1 << (8 * size - 1)
    data = np.resize(np.array([0, 1, largest, sign | largest], f"u{size}"), CHUNK_BYTES + 16)
    data[place] = bits
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "first": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]},
            "a": {"dtype": dtype, "shape": [len(data)], "data_offsets": [8, 8 + data.nbytes]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + b"\xff" * 8 + data.tobytes()


@pytest.mark.parametrize("dtype", NONFINITE)
def test_a_number_that_is_not_finite_is_found_in_every_format(tmp_path: Path, dtype: str) -> None:
    size, first = NONFINITE[dtype]
    sign = 1 << (8 * size - 1)
    path = tmp_path / "given.safetensors"
    path.write_bytes(with_bits(first - 1, dtype, 0))
    check_numbers(read_tensors(path, "body"), "body")
    for bits in (first, sign | first, sign - 1, 2 * sign - 1):
        for place in (0, CHUNK_BYTES // 2, -1):
            path.write_bytes(with_bits(bits, dtype, place))
            with pytest.raises(InvalidRequest, match="tensor a has NaN or infinity") as error:
                check_numbers(read_tensors(path, "body"), "body")
            assert error.value.field == "body"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_torch_calls_not_finite_are_refused(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    path = tmp_path / "given.safetensors"
    limits = torch.finfo(dtype)
    good = torch.tensor([limits.min, limits.max, limits.tiny, -0.0], dtype=dtype)
    save_torch_file({"good": good, "bad": torch.cat([good, torch.tensor([value], dtype=dtype)])}, path)
    with pytest.raises(InvalidRequest, match="tensor bad has"):
        check_numbers(read_tensors(path, "path"), "path")


def test_a_file_that_changes_before_its_numbers_are_checked_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "given.safetensors", 1)
    given = read_tensors(path, "path")
    os.utime(path, (1, 1))
    with pytest.raises(InvalidRequest, match="has changed since it was checked"):
        check_numbers(given, "path")
