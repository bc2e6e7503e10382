"""Request and response models of ``/darts/v1/queue``."""

import json
from typing import Any, Self

from pydantic import BaseModel, Field

from darts_server.http.body import Body
from darts_server.http.json_encoding import encode_ascii
from darts_server.http.resources.rollouts_encoding import group_fields
from darts_server.http.resources.rollouts_models import MAX_PROMPTS, GroupOut, PromptIn
from darts_server.identifiers import Name
from darts_server.rollout.batches.results import GroupResult
from darts_server.rollout.queue.entries import AckOutcome, WaitsFor
from darts_server.rollout.queue.handout import TakenGroup
from darts_server.rollout.queue.job_entries import JobEntries

DEFAULT_JOB = "default"
MAX_PRIORITY = 2**31 - 1
MAX_LEASES = 40_000
JOB_OPTIONS = ("groups_per_version", "max_staleness", "groups_ahead", "weight", "expires_after")
MIN_EXPIRES_AFTER = 120
"""Seconds: a request that waits for groups waits no longer than half of it."""
MAX_EXPIRES_AFTER = 2_592_000


class QueuedPromptIn(PromptIn):
    """A prompt with an id of the caller's choice."""

    id: Name | None = Field(
        None,
        description="Unique in its job; a prompt with an id that is known is not added again. Default: one of ours.",
    )


class QueueIn(Body):
    """Prompts for a job of the queue."""

    job: Name = Field(DEFAULT_JOB, description="Name of the job. Jobs share the engine fairly.")
    prompts: list[QueuedPromptIn] = Field(max_length=MAX_PROMPTS, description="May be empty, to change the job alone.")
    group_size: int = Field(ge=1, description="Trajectories returned per prompt.")
    sampling: dict[str, Any] = Field({}, description="vLLM's sampling parameters, by their names.")
    policy: dict[str, Any] = Field(
        {}, description="`name`: the policy; other keys: runtime settings to override for these prompts."
    )
    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Prompts of a higher priority start before others of the job."
    )
    groups_per_version: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Of the job: how many groups its consumers take under each weight version. No more are started "
        "than can be handed out in time. Default: no bound; groups that become too old start again.",
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Of the job: maximum weight versions between a group's first token and when it is handed out. "
        "Default: --max-staleness.",
    )
    groups_ahead: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Of the job: groups that are started in addition, so that slow ones are not waited for. Those that "
        "are not handed out in time start again, before others. Default: 0.",
    )
    weight: float | None = Field(
        None, ge=0.001, le=1000, description="Of the job: its share of tokens, relative to your other jobs. Default: 1."
    )
    expires_after: float | None = Field(
        None,
        ge=MIN_EXPIRES_AFTER,
        le=MAX_EXPIRES_AFTER,
        description="Of the job: seconds without a put, take or acknowledgement after which it is deleted with all "
        "that is in it, unless a group is leased. Default: never.",
    )
    taken: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="Of the job: how many groups count as taken under the served weights from now on. 0 after a "
        "restart of a trainer that took groups and will not make the update that they were for.",
    )

    @property
    def options(self) -> dict[str, object]:
        """The options of the job that it changes."""
        values = {name: getattr(self, name) for name in JOB_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


class PutOut(BaseModel):
    """Prompts that were put."""

    job: str
    ids: list[str] = Field(description="In the order of the prompts.")
    added: int = Field(description="How many of them are new.")


class TakenOut(BaseModel):
    """A group that was handed out."""

    id: str = Field(description="Id of its prompt.")
    lease: str = Field(description="To be acknowledged.")
    lease_until: float = Field(description="Unix seconds. Then, unless acknowledged, it is handed out again.")
    staleness: int = Field(description="Weight versions since its first token.")
    group: GroupOut

    @staticmethod
    def encode(taken: TakenGroup) -> str:
        """Return its JSON; the group is encoded already."""
        head = {"id": taken.name, "lease": taken.lease, "lease_until": taken.lease_until, "staleness": taken.staleness}
        return f'{json.dumps(head, separators=(",", ":"))[:-1]},"group":{taken.group.decode()}}}'


class TakenGroupsOut(BaseModel):
    """Groups that were handed out, those with an error first, then the oldest."""

    groups: list[TakenOut]


class AckIn(Body):
    """Leases of groups that were received, and trained on or stored."""

    leases: list[str] = Field(min_length=1, max_length=MAX_LEASES)


class AckedOut(BaseModel):
    """``outcome``: of one lease."""

    lease: str
    outcome: AckOutcome = Field(
        description="`already`: this lease was acknowledged before. `expired`: the group was handed out again, so it "
        "is not yours any more. `unknown`: you have no such lease."
    )


class AckOut(BaseModel):
    """What was acknowledged, in the order of the leases."""

    acknowledged: int = Field(description="Number of leases that were acknowledged now.")
    leases: list[AckedOut]


class JobOut(BaseModel):
    """A job of the queue."""

    job: str
    owner: str | None = Field(
        None, description="Name of its key, empty for callers without one; for admins, null for others."
    )
    queued: int
    running: int
    ready: int
    leased: int
    bytes: int = Field(description="Of its prompts and groups.")
    groups_per_version: int | None
    max_staleness: int
    groups_ahead: int
    weight: float
    expires_after: float | None
    taken: int = Field(description="Groups that were handed out under the served weights.")
    waits_for: WaitsFor | None = Field(
        description="Why no prompt of it may start: `weights`, as its consumers have taken all groups of this "
        "version, or `consumer`, as enough groups wait to be taken; null if one may."
    )

    @classmethod
    def of(cls, each: JobEntries, version: int, waits_for: WaitsFor | None, *, for_admin: bool) -> Self:
        options = each.job.options
        return cls(
            job=each.job.id[1],
            owner=each.job.id[0] if for_admin else None,
            queued=len(each.order),
            running=len(each.running),
            ready=len(each.ready),
            leased=len(each.leased),
            bytes=each.bytes,
            groups_per_version=options.groups_per_version,
            max_staleness=options.max_staleness,
            groups_ahead=options.groups_ahead,
            weight=options.weight,
            expires_after=options.expires_after,
            taken=each.job.taken_under(version),
            waits_for=waits_for,
        )


class QueueOut(BaseModel):
    """State of the queue."""

    weight_version: int
    durable: bool = Field(
        description="Whether it is kept across restarts: false without --state-dir, and where another server uses its "
        "file in that folder."
    )
    jobs: list[JobOut] = Field(description="Yours; for an admin, all.")


class DroppedOut(BaseModel):
    """A deleted job."""

    job: str
    dropped: int = Field(description="Prompts and groups that it had.")


def encode_group(result: GroupResult) -> bytes:
    """Encode a group as consumers get it, in ASCII."""
    return encode_ascii(group_fields(result)).encode()
