"""One replica of an ingress: whether it serves, and what runs on it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum

from darts_server.ingress.replicas.replica import Disconnected, Replica


class State(StrEnum):
    """Whether a replica gets requests."""

    UNKNOWN = "unknown"
    """It was not polled yet."""
    SERVING = "serving"
    JOINING = "joining"
    """It was started, and gets the weights that the others serve if its own are others."""
    OUTDATED = "outdated"
    """It serves other weights than the others, and could not get theirs."""
    UNHEALTHY = "unhealthy"
    """It says so itself: it is draining, or its engine is dead. What runs on it may still end."""
    REFUSED = "refused"
    """It is not used because of its configuration."""
    LOST = "lost"
    """It does not answer. What ran on it is run again elsewhere."""


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What a server says of its weights.

    ``start``: of the server: another one after each restart. ``is_initial``: whether they are those of its start.
    ``loras``: the same for the same LoRA adapters.
    """

    start: str
    version: int
    is_initial: bool
    loras: str

    @property
    def model(self) -> tuple[int, bool]:
        """What two servers have in common that serve the same weights of the model.

        Updates of LoRA adapters raise the version too: a server that was restarted since has a lower one, and the same
        weights of the model, if these are those of the start.
        """
        return 0 if self.is_initial else self.version, self.is_initial

    @property
    def rank(self) -> tuple[bool, int]:
        """Newer weights have a higher one; those of a start have the lowest."""
        return not self.is_initial, self.model[0]

    def __str__(self) -> str:
        return f"version {self.version}" + (" (of its start)" if self.is_initial else "")


class Member:
    """A replica with its state. ``needs_key``: whether it serves callers with a key only; ``None`` if unknown."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.state = State.UNKNOWN
        self.detail = ""
        self.needs_key: bool | None = None
        self.missed = 0
        """Polls in a row that were not answered."""
        self.weights: ServedWeights | None = None
        """``None``: it does not say which it serves, and its weights are not compared."""
        self.admitted = ""
        """The start of the server whose weights are those of the others."""
        self.pinned: ServedWeights | None = None
        """The only weights with which it may be admitted: what an update that failed did to it is not certain, and it
        may still switch. ``None`` otherwise: then its weights may change while it is admitted."""
        self.is_stopping = False
        """Whether its latest answer says that it stops in order: what it does not end is not to blame for it."""
        self.in_flight = 0
        self.load = 0.0
        """Tokens that its running requests are expected to generate."""
        self._uses: set[asyncio.Timeout] = set()

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def is_admitted(self) -> bool:
        """Whether its weights are those of the others."""
        if self.weights is None:
            return True
        return self.weights.start == self.admitted and self.pinned in (None, self.weights)

    @property
    def serves(self) -> bool:
        return self.state is State.SERVING

    @property
    def is_well(self) -> bool:
        """Whether it serves, and answered when it was last polled."""
        return self.serves and not self.missed

    def change(self, state: State, detail: str = "") -> bool:
        """Set the state; returns whether it is another one. Requests on a lost replica end with `Disconnected`."""
        changed, self.state, self.detail = state is not self.state, state, detail
        if state is State.LOST:
            for use in self._uses:
                use.reschedule(0)
        return changed

    @contextmanager
    def loaded(self, tokens: float) -> Iterator[None]:
        """Expect that many tokens of it in this block."""
        self.load += tokens
        try:
            yield
        finally:
            self.load -= tokens

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Run requests to the replica in this block.

        Raises:
            Disconnected: it was lost.
        """
        try:
            async with asyncio.timeout(None) as use:
                self._uses.add(use)
                self.in_flight += 1
                try:
                    yield
                finally:
                    self.in_flight -= 1
                    self._uses.discard(use)
        except TimeoutError as error:
            if not use.expired():
                raise
            raise Disconnected(f"{self.name} no longer answers") from error
