"""The folder that a bundle unpacks to: wheels and this project, without what is left out."""

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from benchmarks.gpu.packing.fatbin import blank
from benchmarks.gpu.packing.rules import Edit, LeftOut

EXECUTABLE = 0o111
CLASSIFIER = "License :: "
NOT_PROJECT = ("__pycache__", "*.pyc", ".*")


@dataclass(frozen=True, slots=True)
class Package:
    """One that is bundled. ``size``: bytes unpacked."""

    name: str
    version: str
    size: int
    licence: str


class Bundle:
    """``wanted``: parts of vLLM to bring that are left out otherwise. ``architecture``: as 90; whose code to keep."""

    def __init__(
        self,
        folder: Path,
        rules: Sequence[LeftOut],
        wanted: frozenset[str] = frozenset(),
        architecture: int | None = None,
    ) -> None:
        self.folder = folder
        self.left_out: defaultdict[LeftOut, int] = defaultdict(int)
        """Bytes, by rule."""
        self.changed: dict[str, str] = {}
        self._rules = [rule for rule in rules if not rule.unless & wanted]
        self._wanted, self._architecture = wanted, architecture

    def add_wheel(self, wheel: Path) -> Package:
        """Unpack a wheel as an installer would, scripts aside."""
        size = 0
        with ZipFile(wheel) as archive:
            metadata = HeaderParser().parsestr(_member(archive, ".dist-info/METADATA"))
            for member in archive.infolist():
                path = _installed_at(member.filename)
                if path is not None and not member.is_dir() and not self._is_left_out(path, member.file_size):
                    size += self._write(path, archive.read(member), member)
        return Package(metadata["Name"], metadata["Version"], size, licence(metadata))

    def add_project(self, root: Path, folders: Iterable[str], name: str, version: str, licence: str) -> Package:
        """Copy the project's packages, and leave the metadata by which its version is found."""
        copied = [self.folder / Path(path).name for path in folders]
        for path in folders:
            shutil.copytree(root / path, self.folder / Path(path).name, ignore=shutil.ignore_patterns(*NOT_PROJECT))
        about = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        (about / "licenses").mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n"
        )
        shutil.copy(root / "LICENSE", about / "licenses")
        size = sum(f.stat().st_size for folder in [*copied, about] for f in folder.rglob("*") if f.is_file())
        return Package(name, version, size, licence)

    def edit(self, edits: Iterable[Edit]) -> list[str]:
        """Make the changes that this choice of parts needs; those that found nothing to change, in words."""
        failed = []
        for edit in edits:
            if edit.unless & self._wanted:
                continue
            path = self.folder / edit.path
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if text.count(edit.old) == 1:
                path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
                self.changed[edit.path] = edit.why
            else:
                failed.append(f"{edit.path} is not as expected, so it was not changed ({edit.why})")
        return failed

    def _is_left_out(self, path: str, size: int) -> bool:
        for rule in self._rules:
            if fnmatchcase(path, rule.pattern):
                self.left_out[rule] += size
                return True
        return False

    def _write(self, path: str, data: bytes, member: ZipInfo) -> int:
        if self._architecture is not None and path.startswith("vllm/") and path.endswith(".so"):
            code = bytearray(data)
            if blanked := blank(code, self._architecture):
                self.changed[path] = f"device code for other GPUs is blanked: {blanked / 1e6:.1f} MB"
                data = bytes(code)
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if member.external_attr >> 16 & EXECUTABLE else 0o644)
        return len(data)


def licence(metadata: Message) -> str:
    """By a package's metadata: an SPDX expression, or what it has instead."""
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if CLASSIFIER in line]
    classifiers = [name for name in classifiers if name != "OSI Approved"]  # which says no more than that
    free_text = (metadata["License"] or "").strip().split("\n")[0]
    return metadata["License-Expression"] or ", ".join(classifiers) or free_text or "not stated"


def _member(archive: ZipFile, suffix: str) -> str:
    name = next(n for n in archive.namelist() if n.endswith(suffix) and n.count("/") == 1)
    return archive.read(name).decode()


def _installed_at(name: str) -> str | None:
    """Where a file of a wheel lands in the folder; ``None`` for scripts and data."""
    parts = name.split("/")
    if ".." in parts or name.startswith("/"):
        raise ValueError(f"a wheel has a file outside of its folder: {name}")
    if not parts[0].endswith(".data"):
        return name
    return "/".join(parts[2:]) if parts[1] in ("purelib", "platlib") else None
