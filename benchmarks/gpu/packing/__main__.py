"""Makes a bundle: ``benchmarks/gpu/pack --help``."""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu.packing import archive, rules
from benchmarks.gpu.packing.asked import Project
from benchmarks.gpu.packing.bundle import Bundle, Package
from benchmarks.gpu.packing.imports import Missing, Scan
from benchmarks.gpu.packing.options import Options, arguments
from benchmarks.gpu.packing.registry import Registry, RegistryError, Wheels
from benchmarks.gpu.packing.report import Report
from benchmarks.gpu.packing.requirements import Candidate, Demand, NoCandidateError, Plan, Resolver

ROOT = Path(__file__).resolve().parents[3]
UNPACK = Path(__file__).with_name("unpack.py")
BROKEN, WRONG_USE = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        report = pack(options, Registry(options.target, options.wheels), Project(ROOT))
    except (NoCandidateError, RegistryError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return WRONG_USE
    print(report.table())
    return BROKEN if report.broken else 0


def pack(options: Options, wheels: Wheels, project: Project) -> Report:
    """The whole of it: choose, load, lay out, check, compress, and describe."""
    plan = choose(options, wheels, project)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out, prefix=".laid-out-") as folder:
        bundle = Bundle(Path(folder), rules.FILES, options.wanted, options.architecture)
        packages = list(load(plan, wheels, bundle))
        packages.append(bundle.add_project(project.root, rules.FOLDERS, project.name, project.version, project.licence))
        failed = bundle.edit(rules.EDITS)
        missing = check(options, bundle.folder) if options.check else None
        files = {f.relative_to(folder).as_posix(): f.stat().st_size for f in bundle.folder.rglob("*") if f.is_file()}
        splitter = archive.Splitter(options.out, options.part_size)
        archive.write(bundle.folder, splitter, options.level, options.threads, Progress(sum(files.values())))
    whole = archive.Part(archive.ARCHIVE, splitter.size, splitter.sha256)
    report = Report(options, plan, bundle, packages, files, splitter.parts(), whole, failed, missing)
    (options.out / "manifest.json").write_text(json.dumps(report.manifest(), indent=1) + "\n")
    shutil.copy(UNPACK, options.out / "unpack")
    (options.out / "unpack").chmod(0o755)
    return report


def choose(options: Options, wheels: Wheels, project: Project) -> Plan:
    left_out = {name: why for name, why in rules.PACKAGES.items() if name not in options.extra}

    def newest(requirements: Sequence[str]) -> Sequence[Candidate]:
        say(f"choosing {', '.join(requirements)}"[:120])
        return wheels.newest(requirements)

    roots = [Demand(Requirement(f"vllm=={options.vllm}"), "pack"), *project.demands()]
    plan = Resolver(options.target, newest, left_out, rules.KEPT).resolve(roots)
    if "vllm" not in plan.chosen:
        raise NoCandidateError("; ".join(plan.conflicts) or "the target has vLLM already")
    return plan


def load(plan: Plan, wheels: Wheels, bundle: Bundle) -> Sequence[Package]:
    packages = []
    for number, candidate in enumerate(plan.chosen.values(), 1):
        say(f"loading {number}/{len(plan.chosen)}: {candidate.name} {candidate.version}")
        package = bundle.add_wheel(wheels.load(candidate))
        packages.append(Package(canonicalize_name(package.name), package.version, package.size, package.licence))
    return packages


def check(options: Options, folder: Path) -> list[Missing]:
    say("looking for imports that nothing provides")
    modules = [m for name in options.target.installed for m in rules.MODULES.get(name, (name.replace("-", "_"),))]
    routes = [path.relative_to(folder).with_suffix("") for glob in rules.ROUTES for path in folder.glob(glob)]
    return Scan(folder, modules).missing([*rules.ROOTS, *(".".join(path.parts) for path in sorted(routes))])


class Progress:
    """Says each tenth of the way, in bytes."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0

    def __call__(self, size: int) -> None:
        before, self._done = self._done, self._done + size
        if before * 10 // self._total != self._done * 10 // self._total:
            say(f"compressing: {self._done / self._total:.0%} of {self._total / 1e6:.0f} MB")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
