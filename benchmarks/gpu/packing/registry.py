"""Wheels from the package registry that pip is configured for."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from benchmarks.gpu.packing.requirements import Candidate, NoCandidateError
from benchmarks.gpu.packing.target import Target

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
NOT_FOUND = ("No matching distribution found", "Could not find a version", "ResolutionImpossible")


class RegistryError(Exception):
    """pip failed, for another reason than that there is no such package."""


class Wheels(Protocol):
    """Where wheels come from."""

    def newest(self, requirements: Sequence[str], /) -> Sequence[Candidate]: ...
    def load(self, candidate: Candidate, /) -> Path: ...


class Registry:
    """``folder`` keeps the wheels, so that a bundle can be made again without loading them anew."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder / f"cp{target.python.replace('.', '')}-glibc{target.glibc}"

    def newest(self, requirements: Sequence[str]) -> list[Candidate]:
        """Of each package the newest that satisfies what is asked for, by metadata alone where the registry has it.

        Raises:
            NoCandidateError: one of them cannot be satisfied.
            RegistryError
        """
        with tempfile.TemporaryDirectory() as nowhere:
            report = Path(nowhere) / "report.json"
            command = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
            self._pip(*command, "--target", nowhere, *requirements)
            rows = json.loads(report.read_text())["install"]
        return [
            Candidate(
                row["metadata"]["name"], row["metadata"]["version"], tuple(row["metadata"].get("requires_dist", ()))
            )
            for row in rows
        ]

    def load(self, candidate: Candidate) -> Path:
        """The candidate's wheel."""
        if (found := self._loaded(candidate)) is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._pip("download", "--quiet", "--dest", str(self._folder), f"{candidate.name}=={candidate.version}")
            found = self._loaded(candidate)
        assert found is not None, f"pip left no wheel of {candidate.name}"
        return found

    def _loaded(self, candidate: Candidate) -> Path | None:
        for path in self._folder.glob("*.whl"):
            name, version, _, _ = parse_wheel_filename(path.name)
            if (name, version) == (canonicalize_name(candidate.name), Version(candidate.version)):
                return path
        return None

    def _pip(self, command: str, *arguments: str) -> None:
        options = ["--no-deps", *self._target.pip_options()]
        done = subprocess.run([*PIP, command, *options, *arguments], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if any(text in done.stderr for text in NOT_FOUND):
            raise NoCandidateError(done.stderr.strip())
        raise RegistryError(f"pip {command} failed:\n{done.stderr.strip()}")
