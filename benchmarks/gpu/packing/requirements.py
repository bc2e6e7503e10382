"""Which packages a bundle needs: a walk over what its roots require, less what the target has.

The target's packages are fixed points: they are never resolved, only checked. Everything else is taken in the newest
version that satisfies all who ask for it. Where nothing does, whoever is further from the roots is tried in an older
version; if that does not help either, the conflict is named.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from benchmarks.gpu.packing.target import Target

ROUNDS = 50  # a version found anew may ask for more; the real walk takes about ten


@dataclass(frozen=True, slots=True)
class Candidate:
    """A wheel that could be bundled, by its metadata."""

    name: str
    version: str
    requires: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Demand:
    requirement: Requirement
    by: str

    def __str__(self) -> str:
        return f"{self.requirement.specifier or 'any version'} ({self.by})"


class NoCandidateError(Exception):
    """The registry has no wheel for the target that satisfies what was asked for."""


Fetch = Callable[[Sequence[str]], Sequence[Candidate]]
"""Requirements of distinct packages to the newest candidates that satisfy them, in any order."""


@dataclass(slots=True)
class Plan:
    """What goes in, and why the rest does not. ``needed``: who asks for a package, by its name."""

    chosen: dict[str, Candidate] = field(default_factory=dict)
    needed: dict[str, list[Demand]] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    assumed: dict[str, list[Demand]] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)


class Resolver:
    """``left_out`` and ``kept``: reasons, by canonical name. What is kept is not replaced, whatever is asked for."""

    def __init__(self, target: Target, fetch: Fetch, left_out: Mapping[str, str], kept: Mapping[str, str]) -> None:
        self._target, self._fetch = target, fetch
        self._left_out, self._kept = left_out, kept
        self._chosen: dict[str, Candidate] = {}
        self._refused: defaultdict[str, set[str]] = defaultdict(set)  # versions that ask for what cannot be
        self._settled: set[str] = set()  # neither looked for again nor tried in an older version
        self._conflicts: list[str] = []

    def resolve(self, roots: Iterable[Demand]) -> Plan:
        roots = list(roots)
        for _ in range(ROUNDS):
            needed = self._walk(roots)
            missing = {name: demands for name, demands in needed.items() if self._is_missing(name, demands)}
            if not missing:
                return self._plan(needed)
            self._choose(missing)
        raise NoCandidateError(f"no end after {ROUNDS} rounds; still open: {', '.join(missing)}")

    def _walk(self, roots: Sequence[Demand]) -> dict[str, list[Demand]]:
        """All demands that follow from the roots, as far as the candidates chosen by now tell."""
        needed: defaultdict[str, list[Demand]] = defaultdict(list)
        queue, seen = list(roots), set()
        for demand in queue:  # grows while it is read
            name = canonicalize_name(demand.requirement.name)
            needed[name].append(demand)
            extras = {"", *demand.requirement.extras}
            if name not in self._chosen or name in self._left_out or (name, *sorted(extras)) in seen:
                continue
            seen.add((name, *sorted(extras)))
            for text in self._chosen[name].requires:
                requirement = Requirement(text)
                if self._applies(requirement, extras):
                    queue.append(Demand(requirement, self._chosen[name].name))
        return dict(needed)

    def _applies(self, requirement: Requirement, extras: Iterable[str]) -> bool:
        marker, environment = requirement.marker, self._target.markers()
        return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in extras)

    def _is_missing(self, name: str, demands: Sequence[Demand]) -> bool:
        if name in self._left_out or name in self._settled or self._stays(name, demands):
            return False
        chosen = self._chosen.get(name)
        return chosen is None or not all(
            d.requirement.specifier.contains(Version(chosen.version), prereleases=True) for d in demands
        )

    def _stays(self, name: str, demands: Sequence[Demand]) -> bool:
        """Whether the target's own package is used."""
        verdicts = [self._target.has(d.requirement) for d in demands]
        return None not in verdicts and (all(verdicts) or name in self._kept)

    def _choose(self, missing: Mapping[str, Sequence[Demand]]) -> None:
        try:
            found = self._fetch([self._asked(name, demands) for name, demands in missing.items()])
        except NoCandidateError:
            if len(missing) == 1:
                return self._compromise(*missing.items())
            items = list(missing.items())  # halved until the one that fails stands alone
            self._choose(dict(items[: len(items) // 2]))
            return self._choose(dict(items[len(items) // 2 :]))
        self._chosen |= {canonicalize_name(candidate.name): candidate for candidate in found}
        return None

    def _asked(self, name: str, demands: Sequence[Demand]) -> str:
        specifiers = {str(specifier) for demand in demands for specifier in demand.requirement.specifier}
        return name + ",".join(sorted(specifiers | {f"!={version}" for version in self._refused[name]}))

    def _compromise(self, item: tuple[str, Sequence[Demand]]) -> None:
        """Nothing satisfies everybody: take what the first one asks for, and let the others yield if they can."""
        name, demands = item
        if self._refused.pop(name, None):  # there is no older version of it, so it does not yield
            self._settled.add(name)
            return self._choose({name: demands})
        try:
            taken = self._fetch([self._asked(name, demands[:1])])[0].version
        except NoCandidateError:
            taken = None
        if taken is not None:
            self._choose({name: demands[:1]})
            against = {canonicalize_name(d.by) for d in demands if not d.requirement.specifier.contains(taken)}
            if against <= self._chosen.keys() - self._settled:
                for by in against:
                    self._refused[by].add(self._chosen.pop(by).version)
                return None
        self._settled.add(name)
        asked = "; ".join(dict.fromkeys(map(str, demands)))
        self._conflicts.append(f"{name}: no wheel for this target satisfies {asked}; the bundle has {taken or 'none'}")
        return None

    def _plan(self, needed: dict[str, list[Demand]]) -> Plan:
        plan = Plan(needed=needed, conflicts=list(self._conflicts))
        for name, demands in needed.items():
            version = self._target.installed.get(name)
            asked = "; ".join(dict.fromkeys(str(d) for d in demands if not self._target.has(d.requirement)))
            if name in self._left_out:
                if not self._stays(name, demands):
                    plan.left_out[name] = self._left_out[name]
            elif self._stays(name, demands):
                if asked:
                    plan.conflicts.append(f"{name}: the target's {version} stays, against {asked}: {self._kept[name]}")
                elif version is None and any(d.requirement.specifier for d in demands):
                    plan.assumed[name] = [d for d in demands if d.requirement.specifier]
            elif name in self._chosen:
                plan.chosen[name] = self._chosen[name]
                if name in self._target.installed:
                    plan.replaced[name] = f"{version} is there; asked for: {asked}"
        return plan
