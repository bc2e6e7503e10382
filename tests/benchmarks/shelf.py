"""Wheels made up for the tests, and a registry that has nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.gpu.packing.requirements import Candidate, NoCandidateError


class Shelf:
    """Every request is remembered in ``asked``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._candidates: list[Candidate] = []
        self.asked: list[list[str]] = []

    def put(self, name: str, version: str, *requires: str, files: Mapping[str, bytes] | None = None) -> Path:
        self._candidates.append(Candidate(name, version, requires))
        about = f"{name.replace('-', '_')}-{version}.dist-info"
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", "License-Expression: MIT"]
        lines += [f"Requires-Dist: {text}" for text in requires]
        path = self._folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        with ZipFile(path, "w") as wheel:
            wheel.writestr(f"{about}/METADATA", "\n".join(lines) + "\n\n")
            for member, data in (files or {f"{name.replace('-', '_')}/__init__.py": b""}).items():
                wheel.writestr(member, data)
        return path

    def newest(self, requirements: Sequence[str]) -> list[Candidate]:
        self.asked.append(list(requirements))
        return [self._newest(Requirement(text)) for text in requirements]

    def _newest(self, wanted: Requirement) -> Candidate:
        name = canonicalize_name(wanted.name)
        fitting = [
            c for c in self._candidates if canonicalize_name(c.name) == name and wanted.specifier.contains(c.version)
        ]
        if not fitting:
            raise NoCandidateError(f"No matching distribution found for {wanted}")
        return max(fitting, key=lambda c: Version(c.version))

    def load(self, candidate: Candidate) -> Path:
        return self._folder / f"{candidate.name.replace('-', '_')}-{candidate.version}-py3-none-any.whl"
