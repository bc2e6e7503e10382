"""Which tensors a set has, and whether they fit a model. Headers alone are read here, never the data."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from darts_server.exceptions import InvalidRequest

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the safetensors library takes no more."""
LARGEST_INDEX = 1 << 28
FLOATS = frozenset({"F32", "F16", "BF16"})
"""The engine converts among these when it loads."""
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """``dtype`` is safetensors' name, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file. ``stamp`` tells whether it is still the one that was read."""

    path: Path
    tensors: Mapping[str, Tensor]
    stamp: tuple[int, ...]

    @property
    def unchanged(self) -> bool:
        try:
            return _stamp(self.path) == self.stamp
        except OSError:
            return False


TensorSet = Mapping[str, TensorFile]
"""Which file has which tensor."""


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """What a full set for a model has.

    ``tied``: names that may come besides, each with the name of the tensor that it must equal.
    """

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]

    @property
    def most_bytes(self) -> int:
        """No set that fits has more, in whichever dtype."""
        return 8 * sum(prod(tensor.shape) for tensor in self.tensors.values()) + LARGEST_HEADER


def read(path: Path, field: str) -> TensorSet:
    """The tensors of a file, or of a folder: by its index if it has one, else of all its files.

    Raises:
        InvalidRequest: of ``field``; a file is not there, not safetensors, or not whole.
    """
    try:
        return _together((read_file(file, field) for file in _files(path, field)), field)
    except OSError as error:
        raise InvalidRequest(field, f"{path} cannot be read: {error.strerror}") from error


def read_file(path: Path, field: str) -> TensorFile:
    """
    Raises:
        InvalidRequest: of ``field``; it is not safetensors, or not whole.
        OSError
    """
    stamp = _stamp(path)
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            tensors = {name: Tensor(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise InvalidRequest(field, f"not a whole safetensors file: {error}; send or write it again") from error
    return TensorFile(path, tensors, stamp)


def check(expected: ExpectedTensors, given: TensorSet, *, partial: bool, field: str) -> TensorSet:
    """The tensors of a set that a model takes, all of which fit it.

    Raises:
        InvalidRequest: of ``field``; names the first tensor that does not fit.
    """
    for name, file in given.items():
        _check_one(expected, given, name, file, field)
    missing = [name for name in expected.tensors if name not in given]
    if missing and not partial:
        raise InvalidRequest(
            field,
            f"tensor {missing[0]} is missing{_and_more(len(missing) - 1)}; send all {len(expected.tensors)}, "
            "or say partial=true",
        )
    taken = {name: file for name, file in given.items() if name in expected.tensors}
    if not taken:
        raise InvalidRequest(field, "has no tensor; send at least one")
    return taken


def changed(tensors: TensorSet) -> list[Path]:
    """The files of a set that are gone, or not what they were."""
    files = {file.path: file for file in tensors.values()}
    return [path for path, file in files.items() if not file.unchanged]


def by_file(tensors: TensorSet) -> dict[Path, list[str]]:
    """The names in each file."""
    files: dict[Path, list[str]] = {}
    for name, file in tensors.items():
        files.setdefault(file.path, []).append(name)
    return files


def _check_one(expected: ExpectedTensors, given: TensorSet, name: str, file: TensorFile, field: str) -> None:
    tensor, twin = file.tensors[name], expected.tied.get(name)
    wanted = expected.tensors.get(twin or name)
    if wanted is None:
        raise InvalidRequest(field, f"tensor {name} is not one of the model's; leave it out, or correct its name")
    if tensor.shape != wanted.shape or not _converts(tensor.dtype, wanted.dtype):
        raise InvalidRequest(field, f"tensor {name} is {tensor}, and the model's is {wanted}")
    if twin is not None and (twin not in given or not _same(file, name, given[twin], twin)):
        raise InvalidRequest(field, f"tensor {name} differs from {twin}, and the model has one for both; leave it out")


def _converts(given: str, wanted: str) -> bool:
    return given == wanted or {given, wanted} <= FLOATS


def _same(one: TensorFile, name: str, other: TensorFile, twin: str) -> bool:
    (start, end), (second, last) = _place(one.path, name), _place(other.path, twin)
    if end - start != last - second:
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(start)
        b.seek(second)
        return all(a.read(min(CHUNK, end - at)) == b.read(min(CHUNK, end - at)) for at in range(start, end, CHUNK))


def _place(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes are. The library does not tell; the format is its header's length, header, data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + start, 8 + length + end


def _files(path: Path, field: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    names = _indexed(indices[0], field) if indices else sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if not names:
        raise InvalidRequest(field, f"{path} has no *{SUFFIX} file")
    return [path / name for name in names]


def _indexed(index: Path, field: str) -> list[str]:
    if index.stat().st_size > LARGEST_INDEX:
        raise InvalidRequest(field, f"{index.name} is no index of safetensors files")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        plain = all(Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(field, f"{index.name} is no index of safetensors files") from error
    if not plain:
        raise InvalidRequest(field, f"{index.name} names files outside its folder")
    return names


def _together(files: Iterable[TensorFile], field: str) -> TensorSet:
    tensors: dict[str, TensorFile] = {}
    for file in files:
        for name in file.tensors:
            if name in tensors:
                raise InvalidRequest(field, f"tensor {name} is in {tensors[name].path.name} and in {file.path.name}")
            tensors[name] = file
    return tensors


def _stamp(path: Path) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _and_more(count: int) -> str:
    return f", and {count} more" if count else ""
