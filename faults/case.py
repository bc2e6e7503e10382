"""What a fault is, and what is written down about one that was injected."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from random import Random

from darts_server.demo.server import Server

PROMPT = "7a-5b*4>"


class Where(Enum):
    """What a fault is injected into.

    ``SHARED``: the server that outlives all of them. ``SECOND``: one on the same state, with a small KV cache, that is
    stopped by the last of them. ``OWN``: servers that the fault starts itself, or none.
    """

    SHARED = auto()
    SECOND = auto()
    OWN = auto()


@dataclass
class Outcome:
    """``injected``: how often. ``survived``, ``lost``: groups of others meanwhile; where all callers are hit, those who
    got what they asked for or a clear error, and those who did not. ``stall``: longest wait of any, seconds; ``None``
    where nobody waits. ``wrong``: what else did not hold. ``skipped``: why nothing was done.
    """

    injected: int = 0
    survived: int = 0
    lost: int = 0
    stall: float | None = None
    wrong: list[str] = field(default_factory=list)
    skipped: str | None = None

    @property
    def verdict(self) -> str:
        if self.skipped is not None:
            return f"skipped: {self.skipped}"
        return "NOT survived" if self.wrong or self.lost else "survived"

    @property
    def counts(self) -> str:
        stall = "" if self.stall is None else f", longest stall {self.stall:.1f} s"
        return f"{self.injected} injected, {self.survived} survived, {self.lost} lost{stall}"

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


@dataclass
class Scene:
    """Where it happens. ``quick``: inject as few as say something. ``other``: the shared server, for `Where.SECOND`."""

    folder: Path
    quick: bool
    random: Random
    server: Server | None = None
    other: Server | None = None

    @property
    def target(self) -> Server:
        assert self.server is not None, "this fault has no server"
        return self.server

    def few(self, many: int, few: int) -> int:
        return few if self.quick else many


@dataclass(frozen=True)
class Fault:
    """``text``: what is done, for the table."""

    name: str
    text: str
    where: Where
    inject: Callable[[Scene], Awaitable[Outcome]]
