"""What a bundle is, for programs (the manifest) and for people (the table)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.packing.archive import Part
from benchmarks.gpu.packing.bundle import Bundle, Package
from benchmarks.gpu.packing.imports import Missing, When
from benchmarks.gpu.packing.options import Options
from benchmarks.gpu.packing.requirements import Plan
from benchmarks.gpu.packing.rules import ROOTS

FORMAT = 1
MEANING = {
    When.ALWAYS: "imported at start and provided by nobody",
    When.UNDER_A_CONDITION: "imported on other platforms or for other models",
    When.TRIED: "tried and done without",
    When.LATER: "only when a feature is used",
}


@dataclass(frozen=True, slots=True)
class Report:
    """``files``: bytes by path. ``failed``: edits that were not possible. ``missing``: ``None`` if unchecked."""

    options: Options
    plan: Plan
    bundle: Bundle
    packages: Sequence[Package]
    files: Mapping[str, int]
    parts: Sequence[Part]
    archive: Part
    failed: Sequence[str]
    missing: Sequence[Missing] | None

    def manifest(self) -> dict[str, Any]:
        options, plan = self.options, self.plan
        return {
            "format": FORMAT,
            "target": {
                "python": options.target.python,
                "glibc": options.target.glibc,
                "torch": options.target.torch,
                "architecture": options.architecture,
                "installed": dict(options.target.installed),
            },
            "vllm": options.vllm,
            "attention": options.attention,
            "brought": sorted(options.wanted),
            "archive": {**asdict(self.archive), "unpacked": sum(self.files.values())},
            "parts": [asdict(part) for part in self.parts],
            "packages": [{**asdict(package), "why": self.why(package.name)} for package in self.packages],
            "left_out": {
                "packages": plan.left_out,
                "files": [{"pattern": r.pattern, "why": r.why, "size": n} for r, n in self.bundle.left_out.items()],
            },
            "changed": self.bundle.changed,
            "conflicts": [*plan.conflicts, *self.failed],
            "assumed": {name: [str(demand) for demand in demands] for name, demands in plan.assumed.items()},
            "missing": {MEANING[when]: modules for when, modules in self._missing_by_kind().items()},
            "roots": list(ROOTS),
            "files": dict(self.files),
        }

    def why(self, name: str) -> str:
        if name in self.plan.replaced:
            return f"replaces the target's: {self.plan.replaced[name]}"
        return ", ".join(dict.fromkeys(demand.by for demand in self.plan.needed.get(name, []))) or "asked for"

    def table(self) -> str:
        rows = [
            f"| {p.name} | {p.version} | {p.size / 1e6:.1f} | {self.why(p.name)} |"
            for p in sorted(self.packages, key=lambda p: -p.size)
        ]
        lines = ["| package | version | MB unpacked | asked for by |", "|---|---|---|---|", *rows, ""]
        files = ", ".join(f"{r.pattern} ({n / 1e6:.0f} MB)" for r, n in self.bundle.left_out.items() if n >= 1e6)
        lines += [f"left out: {files}", f"left out: {', '.join(sorted(self.plan.left_out))}"]
        lines += [f"changed: {path}: {why}" for path, why in self.bundle.changed.items()]
        lines += [f"conflict: {text}" for text in (*self.plan.conflicts, *self.failed)]
        if self.plan.assumed:
            lines.append(f"versions not known, taken to do: {', '.join(sorted(self.plan.assumed))}")
        lines += [f"{MEANING[when]}: {', '.join(modules)}" for when, modules in self._missing_by_kind().items()]
        if self.missing is not None and not self.broken:
            lines.append("all that is imported at start is there")
        lines += ["", "| part | MB | sha256 |", "|---|---|---|"]
        unpacked = f"in all, {sum(self.files.values()) / 1e6:.0f} MB unpacked"
        whole = Part(unpacked, self.archive.size, self.archive.sha256)
        lines += [f"| {part.name} | {part.size / 1e6:.1f} | {part.sha256[:16]}… |" for part in (*self.parts, whole)]
        return "\n".join(lines)

    @property
    def broken(self) -> bool:
        return any(item.when is When.ALWAYS for item in self.missing or [])

    def _missing_by_kind(self) -> dict[When, list[str]]:
        """Whole names where the failure counts or only a part of something bundled is missing; else the top's."""
        bundled = {path.partition("/")[0] for path in self.files}
        kinds: dict[When, list[str]] = {}
        named: set[str] = set()
        for item in self.missing or []:
            top = item.module.partition(".")[0]
            short = item.module if top in bundled else top
            name = f"{item.module} (by {item.by})" if item.when is When.ALWAYS else short
            if name not in named:
                named.add(name)
                kinds.setdefault(item.when, []).append(name)
        return kinds
