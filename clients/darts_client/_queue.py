"""`/darts/v1/queue`: requests are built, and the groups of its answers are checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._models import Group, WireModel
from ._prompts import drop_none, prompt_body
from ._rollouts import GroupPayload, RolloutsRequest, build_group, tokens_in_payload

Outcome = Literal["acknowledged", "already", "expired", "unknown"]
"""What an acknowledgement did."""


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
    """

    job: str
    queued: int
    running: int
    ready: int
    leased: int
    bytes: int
    groups_per_version: int | None = None
    max_staleness: int
    groups_ahead: int = 0
    weight: float = 1.0
    taken: int = 0
    waits_for: str | None = None


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


def put_body(
    prompts: Iterable[Any],
    ids: Sequence[str] | None,
    sampling: Mapping[str, Any],
    policy: str | Mapping[str, Any] | None,
    **options: Any,
) -> dict[str, Any]:
    """Build the body of a put. `options` are left out where they are None."""
    bodies = [prompt_body(prompt) for prompt in prompts]
    if ids is not None:
        if len(ids) != len(bodies):
            raise ValueError(f"ids must have one for each of {len(bodies)} prompts, got {len(ids)}")
        bodies = [body | {"id": name} for body, name in zip(bodies, ids, strict=True)]
    named = {"name": policy} if isinstance(policy, str) else policy
    return {"prompts": bodies, "sampling": drop_none(sampling), **drop_none(options | {"policy": named})}


def leases_of(groups: QueuedGroup | str | Iterable[QueuedGroup | str]) -> list[str]:
    """Return the leases of one group or several, or leases themselves."""
    listed = [groups] if isinstance(groups, QueuedGroup | str) else groups
    return [each.lease if isinstance(each, QueuedGroup) else each for each in listed]
