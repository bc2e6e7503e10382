"""`/darts/v1/queue`: requests are built, and the groups of its answers are checked."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal
from uuid import uuid4

from ._errors import NotFound, Overloaded, ServerFault, StatusError
from ._models import Group, WireModel
from ._prompts import drop_none, list_queue_prompts, prompt_body
from ._rollouts import GroupPayload, RolloutsRequest, build_group, tokens_in_payload

Outcome = Literal["acknowledged", "already", "expired", "unknown"]
"""What an acknowledgement did."""

# A slow iterator of prompts holds groups back for so long, and not until `ahead` prompts were drawn.
DRAW_SECONDS = 0.1
# Where the server does not say when there may be room.
PUT_AGAIN_SECONDS = 5.0
# A stream's job is deleted when it was not used for so long, which is more than a step of a trainer takes.
STREAM_EXPIRES_SECONDS = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A group that was handed out. `id` is that of its prompt.

    Until `lease_until`, in Unix seconds, it is leased to whoever took it; unless it is acknowledged by then, it is
    handed out again. `staleness`: weight versions between its first token and when it was handed out. A group that
    failed has an `error`, and no trajectories.
    """

    id: str
    lease: str
    lease_until: float
    staleness: int
    group: Group


class JobRecord(WireModel):
    """A job of the queue: how many prompts it has in each state, their `bytes`, and its options.

    `taken`: groups that were handed out under the served weights. `waits_for`: why none of its prompts may start.
    `owner`: for admins, the name of its key, empty for callers without one.
    """

    job: str
    owner: str | None = None
    queued: int
    running: int
    ready: int
    leased: int
    bytes: int
    groups_per_version: int | None = None
    max_staleness: int
    groups_ahead: int = 0
    weight: float = 1.0
    expires_after: float | None = None
    taken: int = 0
    waits_for: str | None = None

    @property
    def prompts(self) -> int:
        """How many prompts it has that were not acknowledged."""
        return self.queued + self.running + self.ready + self.leased


class PutPayload(WireModel):
    """The answer to a put."""

    ids: list[str]
    added: int


class _TakenPayload(WireModel):
    id: str
    lease: str
    lease_until: float
    staleness: int
    group: GroupPayload

    def build(self) -> QueuedGroup:
        with_logprobs = any(trajectory.logprobs is not None for trajectory in self.group.trajectories)
        request = RolloutsRequest((), 0, 1, with_logprobs, "groups", b"", None)
        group = build_group(self.group, request, tokens_in_payload, survivors=True)
        return QueuedGroup(self.id, self.lease, self.lease_until, self.staleness, group)


class TakenGroupsPayload(WireModel):
    """Groups that were handed out."""

    groups: list[_TakenPayload]

    def build(self) -> list[QueuedGroup]:
        return [taken.build() for taken in self.groups]


class _AckedPayload(WireModel):
    outcome: Outcome


class AckPayload(WireModel):
    """The answer to an acknowledgement."""

    leases: list[_AckedPayload]


class JobsPayload(WireModel):
    """The caller's jobs."""

    jobs: list[JobRecord]


class DroppedPayload(WireModel):
    """The answer to a deletion."""

    dropped: int


def put_request(
    prompts: Iterable[Any],
    *,
    job: str,
    group_size: int,
    ids: Sequence[str] | None = None,
    temperature: float = 1.0,
    policy: str | Mapping[str, Any] | None = None,
    logprobs: bool = True,
    priority: int = 0,
    groups_per_version: int | None = None,
    max_staleness: int | None = None,
    groups_ahead: int | None = None,
    weight: float | None = None,
    expires_after: float | None = None,
    taken: int | None = None,
    idempotency_key: str | None = None,
    **sampling: Any,
) -> dict[str, Any]:
    """Build the body and the headers of a put, as httpx takes them. Options that are None are left out."""
    bodies = [prompt_body(prompt) for prompt in prompts]
    if ids is not None:
        if len(ids) != len(bodies):
            raise ValueError(f"ids must have one for each of {len(bodies)} prompts, got {len(ids)}")
        bodies = [body | {"id": name} for body, name in zip(bodies, ids, strict=True)]
    options = {
        "job": job,
        "group_size": group_size,
        "policy": {"name": policy} if isinstance(policy, str) else policy,
        "priority": priority,
        "groups_per_version": groups_per_version,
        "max_staleness": max_staleness,
        "groups_ahead": groups_ahead,
        "weight": weight,
        "expires_after": expires_after,
        "taken": taken,
    }
    sampling |= {"temperature": temperature, "logprobs": logprobs or None}
    return {
        "json": {"prompts": bodies, "sampling": drop_none(sampling), **drop_none(options)},
        "headers": {"Idempotency-Key": idempotency_key or uuid4().hex},
    }


class StreamPrompts:
    """The prompts of a stream: which come next, and which are in the queue.

    `ahead`: how many may be in the queue. `build`: builds the request that puts prompts. `clock`: seconds.
    """

    def __init__(
        self,
        prompts: Any,
        ahead: int,
        build: Callable[[Sequence[Any]], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        self._prompts = list_queue_prompts(prompts)
        self._ahead = ahead
        self._build = build
        self._clock = clock
        self._in_queue: set[str] = set()
        self._put: dict[str, Any] | None = None
        self._retry_at: float | None = None
        self._is_slow = False
        self._check_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether every prompt's group was acknowledged. Valid after `next_put`."""
        return not self._in_queue and self._put is None

    @property
    def in_queue(self) -> bool:
        """Whether there are groups to take."""
        return bool(self._in_queue)

    @property
    def unanswered_put(self) -> dict[str, Any] | None:
        """The put that the server may have served, or may yet serve, without our knowing."""
        return self._put if self._retry_at is None else None

    def next_put(self) -> dict[str, Any] | None:
        """Return the next put to send: a refused one again when it is due, else one of new prompts if there is room."""
        if self._put is None:
            if prompts := self._draw():
                self._put = self._build(prompts)
        elif self._in_queue and self._retry_at is not None and self._clock() < self._retry_at:
            return None
        self._retry_at = None
        return self._put

    def put_accepted(self, ids: Iterable[str]) -> None:
        """Count the prompts of the put as in the queue."""
        self._in_queue.update(ids)
        self._put = None

    def put_failed(self, error: StatusError) -> None:
        """Keep the prompts for later if there are groups to take until then, whose acknowledgement makes room.

        Raises:
            StatusError: `error` itself, otherwise.
        """
        if isinstance(error, Overloaded) and self._in_queue:
            self._retry_at = self._clock() + (error.retry_after or PUT_AGAIN_SECONDS)
            return
        if not isinstance(error, ServerFault):  # a gateway may have passed the request on
            self._put = None
        raise error

    def seconds_to_wait(self, most: float) -> float:
        """Return how long to wait for groups: until the next put is due, and at most so long."""
        if self._retry_at is not None:
            return min(most, max(0.0, self._retry_at - self._clock()))
        return 0.0 if self._is_slow else most

    def is_new(self, name: str) -> bool:
        """Whether the group of this prompt has not been yielded: one comes again where its lease expired."""
        return name in self._in_queue

    def acknowledged(self, name: str, outcome: Outcome) -> None:
        """Remove a prompt whose group was yielded and acknowledged.

        Raises:
            NotFound: the job has been deleted, and other groups would never come.
        """
        self._in_queue.discard(name)
        if outcome == "unknown":
            self.check_held(0)

    def is_check_due(self, every: float) -> bool:
        """Whether to request how many prompts the job has; at most once in so many seconds."""
        if self._clock() < self._check_at:
            return False
        self._check_at = self._clock() + every
        return True

    def check_held(self, count: int) -> None:
        """Check how many prompts the job has: if it was deleted, the next put has created it again without the others.

        Raises:
            NotFound: the job was deleted, and groups that the stream waits for would never come.
        """
        if (lost := len(self._in_queue) - count) > 0:
            raise NotFound(f"the stream's job was deleted, {lost} of its prompts have no group", status_code=404)

    def _draw(self) -> list[Any]:
        room, drawn, end = self._ahead - len(self._in_queue), [], self._clock() + DRAW_SECONDS
        self._is_slow = False
        for prompt in islice(self._prompts, room):
            drawn.append(prompt)
            if len(drawn) < room and self._clock() >= end:
                self._is_slow = True
                break
        return drawn


def leases_of(groups: QueuedGroup | str | Iterable[QueuedGroup | str]) -> list[str]:
    """Return the leases of one group or several, or leases themselves."""
    listed = [groups] if isinstance(groups, QueuedGroup | str) else groups
    return [each.lease if isinstance(each, QueuedGroup) else each for each in listed]
