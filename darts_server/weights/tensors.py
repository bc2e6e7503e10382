"""Sets of tensors in safetensors files, and whether they fit a model. Only headers are read here, not the data."""

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
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_INDEX_BYTES = 1 << 28
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
"""The engine converts between these when it loads."""
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype of a tensor; ``dtype`` is safetensors' name, such as ``BF16``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file. ``stamp``: its identity, size and time of change when it was read."""

    path: Path
    tensors: Mapping[str, Tensor]
    stamp: tuple[int, ...]

    @property
    def is_unchanged(self) -> bool:
        """Whether it is still the file that was read."""
        try:
            return _stamp(self.path) == self.stamp
        except OSError:
            return False


TensorSet = Mapping[str, TensorFile]
"""The file of each tensor, by the tensor's name."""


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors of a full set for a model.

    ``tied``: names that a set may have in addition, each with the name of the tensor that it must equal.
    """

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]

    @property
    def max_bytes(self) -> int:
        """Size of the largest set that fits, in any dtype."""
        return 8 * sum(prod(tensor.shape) for tensor in self.tensors.values()) + MAX_HEADER_BYTES


def read_tensors(path: Path, field: str) -> TensorSet:
    """Read the headers of a file, or of a folder: the files of its index if it has one, otherwise all.

    Raises:
        InvalidRequest: of ``field``; a file is missing, not safetensors, or incomplete.
    """
    try:
        return _merge((read_file(file, field) for file in _list_files(path, field)), field)
    except OSError as error:
        raise InvalidRequest(field, f"{path} cannot be read: {error.strerror}") from error


def read_file(path: Path, field: str) -> TensorFile:
    """Read the header of a file.

    Raises:
        InvalidRequest: of ``field``; the file is not safetensors, or incomplete.
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


def check_tensors(expected: ExpectedTensors, given: TensorSet, *, partial: bool, field: str) -> TensorSet:
    """Check that a set fits a model. Returns the tensors to load: all but tied ones.

    Raises:
        InvalidRequest: of ``field``; names the first tensor that does not fit.
    """
    for name, file in given.items():
        _check_tensor(expected, given, name, file, field)
    missing = [name for name in expected.tensors if name not in given]
    if missing and not partial:
        raise InvalidRequest(
            field,
            f"tensor {missing[0]} is missing{_and_more(len(missing) - 1)}; send all {len(expected.tensors)}, "
            "or say partial=true",
        )
    checked = {name: file for name, file in given.items() if name in expected.tensors}
    if not checked:
        raise InvalidRequest(field, "has no tensor; send at least one")
    return checked


def changed_files(tensors: TensorSet) -> list[Path]:
    """The files of a set that were removed or changed since they were read."""
    files = {file.path: file for file in tensors.values()}
    return [path for path, file in files.items() if not file.is_unchanged]


def names_by_file(tensors: TensorSet) -> dict[Path, list[str]]:
    """The names of the tensors in each file."""
    files: dict[Path, list[str]] = {}
    for name, file in tensors.items():
        files.setdefault(file.path, []).append(name)
    return files


def _check_tensor(expected: ExpectedTensors, given: TensorSet, name: str, file: TensorFile, field: str) -> None:
    tensor, tied_to = file.tensors[name], expected.tied.get(name)
    wanted = expected.tensors.get(tied_to or name)
    if wanted is None:
        raise InvalidRequest(field, f"tensor {name} is not one of the model's; leave it out, or correct its name")
    if tensor.shape != wanted.shape or not _is_convertible(tensor.dtype, wanted.dtype):
        raise InvalidRequest(field, f"tensor {name} is {tensor}, and the model's is {wanted}")
    if tied_to is not None and (tied_to not in given or not _have_equal_data(file, name, given[tied_to], tied_to)):
        raise InvalidRequest(
            field, f"tensor {name} differs from {tied_to}, and the model has one for both; leave it out"
        )


def _is_convertible(given: str, wanted: str) -> bool:
    return given == wanted or {given, wanted} <= FLOAT_DTYPES


def _have_equal_data(file: TensorFile, name: str, other: TensorFile, other_name: str) -> bool:
    (start, end), (other_start, other_end) = _data_range(file.path, name), _data_range(other.path, other_name)
    if end - start != other_end - other_start:
        return False
    with file.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(start)
        b.seek(other_start)
        return all(
            a.read(min(CHUNK_BYTES, end - at)) == b.read(min(CHUNK_BYTES, end - at))
            for at in range(start, end, CHUNK_BYTES)
        )


def _data_range(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes begin and end in its file.

    The library does not expose it. The format is: length of the header (8 bytes, little-endian), header, data.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(length))[name]["data_offsets"]
    return 8 + length + start, 8 + length + end


def _list_files(path: Path, field: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    names = _read_index(indices[0], field) if indices else sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if not names:
        raise InvalidRequest(field, f"{path} has no *{SUFFIX} file")
    return [path / name for name in names]


def _read_index(index: Path, field: str) -> list[str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise InvalidRequest(field, f"{index.name} is no index of safetensors files")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        are_plain = all(Path(name).name == name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(field, f"{index.name} is no index of safetensors files") from error
    if not are_plain:
        raise InvalidRequest(field, f"{index.name} names files outside its folder")
    return names


def _merge(files: Iterable[TensorFile], field: str) -> TensorSet:
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
