"""What the queue keeps: jobs, the terms of their prompts, and one entry for each prompt."""

import json
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Self

JobId = tuple[str, str]
"""Name of the owner, empty for callers without a key, and name of the job."""

WaitsFor = Literal["weights", "consumer"]
"""What must happen before a job's next prompt may start: a weight update, or the consumer takes groups."""

MODEL, NUMBER, JOB, TERMS, ENTRY = "model", "number", "job", "terms", "entry"
PROMPT, GROUP = "prompt", "group"
"""Kinds of what is on the disk, with those of `history`."""


class EntryState(StrEnum):
    """Where an entry is between `put` and its acknowledgement."""

    QUEUED = "queued"
    RUNNING = "running"
    READY = "ready"
    """Its group has ended, with trajectories or with an error, and waits to be taken."""
    LEASED = "leased"
    """Its group was handed out, and is not acknowledged."""

    @property
    def is_open(self) -> bool:
        """Whether its group has begun and was not handed out."""
        return self in (EntryState.RUNNING, EntryState.READY)


class AckOutcome(StrEnum):
    """What an acknowledgement did."""

    ACKNOWLEDGED = "acknowledged"
    ALREADY = "already"
    """The same lease was acknowledged before."""
    EXPIRED = "expired"
    """The lease expired, and the group was handed out again under another one."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How a job is admitted.

    ``groups_per_version``: how many groups its consumers take under each weight version; ``None`` if they say nothing.
    ``max_staleness``: weight versions between the first token of a group and when it is handed out.
    ``groups_ahead``: that are started in addition to those that can be handed out in time; those that are not taken in
    time start again. ``weight``: its share of the tokens of its owner, relative to its other jobs. ``expires_after``:
    seconds without a put, take or acknowledgement after which it is dropped; ``None`` for never.
    """

    groups_per_version: int | None = None
    max_staleness: int = 1
    groups_ahead: int = 0
    weight: float = 1.0
    expires_after: float | None = None


@dataclass(frozen=True, slots=True)
class Terms:
    """What prompts that were put together have in common. ``sampling``, ``policy``: as their caller sent them.

    ``encoded``: all of it as JSON, the same text for equal terms.
    """

    group_size: int
    sampling: dict[str, Any]
    policy: dict[str, Any]
    encoded: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = {"group_size": self.group_size, "sampling": self.sampling, "policy": self.policy}
        object.__setattr__(self, "encoded", json.dumps(values, sort_keys=True))


@dataclass(slots=True)
class Entry:
    """One prompt, and later its group.

    ``number``: in the order of arrival. ``name``: the caller's id of it, unique in its job. ``terms``: number of its
    `Terms`. ``digest``: of its prompt and terms. ``queued_at``: Unix seconds. ``was_restarted``: it goes first.
    ``version``: of the weights of its first token; while it runs, a lower bound of that. ``is_failed``: its group
    has an error. ``aborts``: how often it was aborted from outside. ``ready_number``: in the order in which groups
    became ready. ``lease``: the latest one, also after it has expired; ``takes``: of its job
    then. ``take_key``: of the request that took it.
    """

    number: int
    job: JobId
    name: str
    terms: int
    digest: str
    prompt_key: str | None
    priority: int
    prompt_bytes: int
    queued_at: float
    state: EntryState = EntryState.QUEUED
    was_restarted: bool = False
    version: int = 0
    is_failed: bool = False
    aborts: int = 0
    group_bytes: int = 0
    ready_number: int = 0
    lease: str | None = None
    lease_until: float = 0.0
    leased_version: int = 0
    takes: int = 0
    take_key: str | None = None

    @property
    def owner(self) -> str:
        return self.job[0]

    @property
    def size(self) -> int:
        """Bytes of its prompt and group."""
        return self.prompt_bytes + self.group_bytes

    def encode(self) -> bytes:
        """Encode it for the disk. A running entry is queued there: after a restart it runs again."""
        values = {name: getattr(self, name) for name in self.__slots__}  # `asdict` takes ten times as long
        if self.state is EntryState.RUNNING:
            values["state"] = EntryState.QUEUED
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        values = _known(cls, json.loads(value))
        values["job"], values["state"] = tuple(values["job"]), EntryState(values["state"])
        return cls(**values)


@dataclass(slots=True)
class Job:
    """A queue of its own within its owner's.

    ``number``: differs from that of an earlier job with the same id. ``is_admin``: whether its owner was an admin, who
    has no quota. ``version``, ``taken``: how many groups were handed out under this weight version, without those that
    came back. ``takes``: how often ``taken`` was reset.
    """

    id: JobId
    options: JobOptions = field(default_factory=JobOptions)
    is_admin: bool = False
    version: int = 0
    taken: int = 0
    number: int = 0
    takes: int = 0

    def taken_under(self, version: int) -> int:
        return self.taken if self.version == version else 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        values = _known(cls, json.loads(value))
        values["id"], values["options"] = tuple(values["id"]), JobOptions(**_known(JobOptions, values["options"]))
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What remains of an acknowledged entry for a while, so that repeated requests are recognized.

    ``order``: in which they were acknowledged.
    """

    number: int
    job: JobId
    name: str
    digest: str
    lease: str
    order: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        values = _known(cls, json.loads(value))
        return cls(**{**values, "job": tuple(values["job"])})


def _known(cls: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(cls)}
    return {name: value for name, value in values.items() if name in names}
