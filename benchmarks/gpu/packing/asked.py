"""What the target asks for, as requirements: vLLM, this project, and what the benchmarks and examples import."""

import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.gpu.packing.requirements import Demand
from benchmarks.gpu.packing.rules import NEEDED_BY_EXAMPLES, VLLM_FOR_TORCH


class Project:
    """This project, by its ``pyproject.toml``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        about = _project(root)
        self.name, self.version, self.licence = about["name"], about["version"], about["license"]

    def demands(self) -> list[Demand]:
        texts = {self.name: _project(self.root)["dependencies"], "examples": NEEDED_BY_EXAMPLES}
        client = _project(self.root / "clients")
        texts[client["name"]] = client["dependencies"]
        return [Demand(Requirement(text), by) for by, requirements in texts.items() for text in requirements]


def vllm_for(torch: str) -> str:
    """The vLLM to bundle beside a torch.

    Raises:
        ValueError: none is known.
    """
    try:
        return VLLM_FOR_TORCH[Version(torch).public]
    except KeyError:
        known = ", ".join(VLLM_FOR_TORCH)
        raise ValueError(f"which vLLM is built for torch {torch} is not known, only for {known}; say --vllm") from None


def _project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text())["project"])
