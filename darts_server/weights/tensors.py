"""Sets of tensors in safetensors files, and the checks that they fit a model and have finite numbers."""

import errno
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from darts_server.exceptions import Forbidden, InvalidRequest
from darts_server.files import Stamp, list_folder, open_file, open_unchanged, path_of, read_file, stamp_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
MAX_INDEX_BYTES = 1 << 26
"""Limit of an index: several times the index of the largest public models."""
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
"""Formats that the engine converts between when it loads."""
WIDEST_DTYPE_BYTES = 8
CHUNK_BYTES = 1 << 20
"""Bytes that are read at once: few enough to stay in a core's cache."""


NONFINITE = {
    "F64": (8, 0x7FF0_0000_0000_0000),
    "F32": (4, 0x7F80_0000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7F),
}
"""Floating-point formats: bytes, and bits of the smallest positive value that is not finite."""


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str
    """Safetensors' name, such as ``BF16``."""

    def __str__(self) -> str:
        return f"{self.dtype} of shape {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorFile:
    path: Path
    tensors: Mapping[str, Tensor]
    stamp: Stamp
    """Taken when the header was read."""


TensorSet = Mapping[str, TensorFile]
"""File of each tensor, by the tensor's name."""
FilePlan = Sequence[tuple[TensorFile, Sequence[str]]]
"""Files, each with the names of the tensors to load."""


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors of a full set for a model."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str]
    """Names of tensors that a set may have too, each with the name of the tensor that it must equal."""

    @property
    def max_bytes(self) -> int:
        """Size of the largest set that fits, in any dtype."""
        return WIDEST_DTYPE_BYTES * sum(prod(tensor.shape) for tensor in self.tensors.values()) + MAX_HEADER_BYTES


def resolve_path(root: Path | None, path: str) -> tuple[Path, Path]:
    """Return the absolute path for a caller's path, and the root to open it below with `files.open_file`.

    Raises:
        Forbidden: there is no root.
        InvalidRequest: the path is outside of the root.
    """
    if root is None:
        raise Forbidden("weights are read from no folder of this machine; start the server with --weights-root FOLDER")
    if not path or "\0" in path:
        raise InvalidRequest("path", "must name a file or folder")
    given = Path(path)
    if ".." in given.parts:
        raise InvalidRequest("path", "must not have '..' in it")
    # The root may be a link, so compare the path before the link is resolved.
    if given.is_relative_to(root):
        given = given.relative_to(root)
    root = root.resolve()
    resolved = given if given.is_absolute() else root / given
    if not resolved.is_relative_to(root):
        raise InvalidRequest("path", f"is outside {root}, the only folder that weights are read from")
    return resolved, root


def read_tensors(path: Path, field: str, root: Path | None = None) -> TensorSet:
    """Read the headers of a safetensors file, or of the files of a folder. ``root``: see `files.open_file`.

    Raises:
        InvalidRequest: about ``field``; a file is missing, not regular, not safetensors, or incomplete.
    """
    file_of_tensor: dict[str, TensorFile] = {}
    try:
        for file_path in _list_files(path, field, root):
            with open_file(file_path, root) as opened:
                try:
                    with safe_open(path_of(opened), "numpy") as header:
                        # The header is no mapping.
                        slices = {name: header.get_slice(name) for name in header.keys()}  # noqa: SIM118
                        tensors = {name: Tensor(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
                except SafetensorError as error:
                    problem = f"not a whole safetensors file: {error}; send or write it again"
                    raise InvalidRequest(field, problem) from error
                file = TensorFile(file_path, tensors, stamp_of(opened))
            for name in tensors:
                if name in file_of_tensor:
                    earlier = file_of_tensor[name].path.name
                    raise InvalidRequest(field, f"tensor {name} is in {earlier} and in {file_path.name}")
                file_of_tensor[name] = file
    except OSError as error:
        raise _unreadable_error(field, path, error) from error
    return file_of_tensor


def check_tensors(
    expected: ExpectedTensors,
    given: TensorSet,
    *,
    partial: bool,
    field: str,
) -> TensorSet:
    """Check that a set fits a model. Return the tensors to load: all except tied tensors.

    Raises:
        InvalidRequest: about ``field``.
    """
    for name, file in given.items():
        tensor = file.tensors[name]
        tied_to = expected.tied.get(name)
        expected_tensor = expected.tensors.get(tied_to or name)
        if expected_tensor is None:
            raise InvalidRequest(field, f"tensor {name} is not one of the model's; leave it out, or correct its name")
        is_convertible = tensor.dtype == expected_tensor.dtype or {tensor.dtype, expected_tensor.dtype} <= FLOAT_DTYPES
        if tensor.shape != expected_tensor.shape or not is_convertible:
            raise InvalidRequest(field, f"tensor {name} is {tensor}, and the model's is {expected_tensor}")
        # The model has one tensor for both names, so the caller's tensors must be equal.
        if tied_to is not None:
            if tied_to not in given:
                raise InvalidRequest(
                    field, f"tensor {name} is tied to {tied_to}, which is missing; send it as {tied_to}"
                )
            try:
                is_equal = _have_equal_data(file, name, given[tied_to], tied_to)
            except OSError as error:
                raise _unreadable_error(field, file.path, error) from error
            if not is_equal:
                raise InvalidRequest(
                    field, f"tensor {name} differs from {tied_to}, and the model has one for both; leave it out"
                )

    missing = [name for name in expected.tensors if name not in given]
    if missing and not partial:
        problem = f"tensor {missing[0]} is missing"
        if len(missing) > 1:
            problem += f", and {len(missing) - 1} more"
        raise InvalidRequest(field, f"{problem}; send all {len(expected.tensors)}, or say partial=true")
    without_tied = {name: file for name, file in given.items() if name in expected.tensors}
    if not without_tied:
        raise InvalidRequest(field, "has no tensor; send at least one")
    return without_tied


def check_numbers(tensors: TensorSet, field: str) -> None:
    """Check that all numbers of a set are finite.

    Raises:
        InvalidRequest: about ``field``; names the first tensor with NaN or infinity.
    """
    for file, names in names_by_file(tensors):
        try:
            with open_unchanged(file.path, file.stamp) as opened:
                name = _find_nonfinite(opened, file, names)
        except OSError as error:
            raise _unreadable_error(field, file.path, error) from error
        if name is not None:
            raise InvalidRequest(
                field,
                f"tensor {name} has NaN or infinity, and its log-probs would have too; send finite numbers "
                "(check_finite=false on /darts/v1/weights accepts others)",
            )


def changed_files(tensors: TensorSet) -> list[Path]:
    """Return the files of a set that were removed or changed since they were read."""

    def is_changed(file: TensorFile) -> bool:
        try:
            return stamp_of(file.path) != file.stamp
        except OSError:
            return True

    return [file.path for file, _ in names_by_file(tensors) if is_changed(file)]


def names_by_file(tensors: TensorSet) -> FilePlan:
    files: dict[Path, tuple[TensorFile, list[str]]] = {}
    for name, file in tensors.items():
        _, names = files.setdefault(file.path, (file, []))
        names.append(name)
    return list(files.values())


def _have_equal_data(
    file: TensorFile,
    name: str,
    other: TensorFile,
    other_name: str,
) -> bool:
    with open_unchanged(file.path, file.stamp) as opened, open_unchanged(other.path, other.stamp) as other_opened:
        remaining_bytes = _seek_tensor(opened, *_read_byte_ranges(opened)[name])
        if remaining_bytes != _seek_tensor(other_opened, *_read_byte_ranges(other_opened)[other_name]):
            return False
        while remaining_bytes:
            size = min(CHUNK_BYTES, remaining_bytes)
            if opened.read(size) != other_opened.read(size):
                return False
            remaining_bytes -= size
        return True


def _find_nonfinite(opened: BinaryIO, file: TensorFile, names: Sequence[str]) -> str | None:
    """Return the name of the first tensor with a number that is not finite, or None.

    Raises:
        OSError: the file has changed.
    """
    # As integers, the bits of floats increase with their size, and the bits of infinity and NaN are the largest. A
    # positive float is not finite if its bits, as a signed integer, are at least those of the smallest value that is
    # not finite. Negative floats are the largest unsigned integers, and have such a limit, too. The two maxima of a
    # part are enough, which is some twenty times as fast as `isfinite`.
    byte_ranges = _read_byte_ranges(opened)
    buffer = np.empty(CHUNK_BYTES, np.uint8)
    for name in names:
        # Integers are always finite.
        size, nonfinite = NONFINITE.get(file.tensors[name].dtype, (0, 0))
        if not size:
            continue
        negative_nonfinite = nonfinite | 1 << (8 * size - 1)
        remaining_bytes = _seek_tensor(opened, *byte_ranges[name])
        while remaining_bytes:
            # The file is read and not mapped into memory: a mapped file that is truncated would end the process.
            part = buffer[: min(remaining_bytes, CHUNK_BYTES)]
            if opened.readinto(part) != len(part):  # type: ignore[attr-defined]
                raise OSError(errno.ESTALE, "has changed since it was checked", str(file.path))
            if part.view(f"i{size}").max() >= nonfinite or part.view(f"u{size}").max() >= negative_nonfinite:
                return name
            remaining_bytes -= len(part)
    return None


def _read_byte_ranges(file: BinaryIO) -> Mapping[str, tuple[int, int]]:
    """Return the byte range of each tensor's data, which safetensors does not expose."""
    # A file has the length of the header (8 bytes, little-endian), the header and the data.
    header_bytes = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(header_bytes))
    data_start = 8 + header_bytes
    offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (data_start + start, data_start + end) for name, (start, end) in offsets.items()}


def _seek_tensor(file: BinaryIO, start: int, end: int) -> int:
    """Move to the start of a tensor's data, and return its size in bytes."""
    file.seek(start)
    return end - start


def _list_files(path: Path, field: str, root: Path | None) -> list[Path]:
    """Return the file itself, or a folder's safetensors files: the files that its index names, or else all."""
    names_in_folder = list_folder(path, root)
    # The path is no folder.
    if names_in_folder is None:
        return [path]
    names = sorted(name for name in names_in_folder if name.endswith(SUFFIX))
    index = min((name for name in names_in_folder if name.endswith(INDEX_SUFFIX)), default=None)
    if index is not None:
        content = read_file(path / index, MAX_INDEX_BYTES, root)
        try:
            names = sorted(set(json.loads(content)["weight_map"].values()))
            # A name with a slash could leave the folder.
            are_plain = all(name.endswith(SUFFIX) and Path(name).name == name and "\0" not in name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(field, f"{index} is no index of safetensors files") from error
        if not are_plain:
            raise InvalidRequest(field, f"{index} may name only *{SUFFIX} files in its folder")
    if not names:
        raise InvalidRequest(field, f"{path} has no *{SUFFIX} file")
    return [path / name for name in names]


def _unreadable_error(field: str, path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(field, f"{error.filename or path} cannot be read: {error.strerror}")
