"""A fault, the scene it is injected into, and its outcome."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random

from darts_server.demo.server import Server

PROMPT = "7a-5b*4>"


class Target(Enum):
    """The server that a fault is injected into.

    ``SHARED``: one that all faults of this kind share. ``SECOND``: another one on the same state folder, with a small
    KV cache; the last fault stops it. ``OWN``: servers that the fault starts itself, or none.
    """

    SHARED = auto()
    SECOND = auto()
    OWN = auto()


@dataclass
class Outcome:
    """What an injected fault did.

    Attributes:
        injected: how often it was injected.
        survived: groups of bystanders that were answered meanwhile. Where a fault hits every caller: callers that got
            a whole group or a clear error.
        lost: groups, or callers, for which that does not hold.
        stall: the longest wait of a caller in seconds; ``None`` without callers.
        violations: other checks that failed.
    """

    injected: int = 0
    survived: int = 0
    lost: int = 0
    stall: float | None = None
    violations: list[str] = field(default_factory=list)

    @property
    def survived_all(self) -> bool:
        return not (self.violations or self.lost)

    @property
    def verdict(self) -> str:
        return "survived" if self.survived_all else "NOT survived"

    @property
    def counts(self) -> str:
        stall = "" if self.stall is None else f", longest stall {self.stall:.1f} s"
        return f"{self.injected} injected, {self.survived} survived, {self.lost} lost{stall}"

    def expect(self, holds: bool, violation: str) -> None:
        """Record the violation unless the condition holds."""
        if not holds:
            self.violations.append(violation)


@dataclass
class Scene:
    """The setting of a fault. ``quick``: inject few. ``other``: the shared server, for `Target.SECOND`."""

    folder: Path
    quick: bool
    random: Random
    server: Server | None = None
    other: Server | None = None

    @property
    def target(self) -> Server:
        assert self.server is not None, "this fault has no server"
        return self.server

    def count(self, many: int, few: int) -> int:
        """Choose how often to inject."""
        return few if self.quick else many


@dataclass(frozen=True)
class Fault:
    name: str
    description: str
    target: Target
    inject: Callable[[Scene], Awaitable[Outcome]]
