"""Abort one trajectory, of a running group or of a single request, and return what it has generated."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import Conflict, NotFound
from darts_server.records import CandidateRecord
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.singles import SingleRequest
from darts_server.serving.admission import caller
from darts_server.types import DiscardReason, Sample

FIELD = "trajectory_id"
MAX_INDEX_DIGITS = 9
"""No group has so many candidates."""


@dataclass(frozen=True, slots=True)
class AbortedTrajectory:
    """What a trajectory had generated when it was aborted. ``record``: of its candidate."""

    trajectory_id: str
    sample: Sample
    record: CandidateRecord


class TrajectoryAborter(Generic[RequestT, OutputT]):
    """Abort trajectories by their ids, ``GROUP:INDEX``, or by the id of a single request.

    ``provenance``: says how those of groups have ended that do not run any more.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        provenance: Provenance,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._provenance = provenance

    async def abort(self, trajectory_id: str) -> AbortedTrajectory:
        """Stop a running trajectory of the caller, and return what it has generated. Its group goes on without it.

        A single request that is aborted by its own id is answered with the same.

        Raises:
            NotFound: the caller has no such trajectory.
            Conflict: it has ended, and the message says how; or several running groups or requests have its id.
        """
        group_id, _, number = trajectory_id.rpartition(":")
        is_index = number.isascii() and number.isdecimal() and len(number) <= MAX_INDEX_DIGITS
        index = int(number) if is_index else -1
        may_see = caller.get().may_see
        runs = [run for run in self._rollouts.find(group_id, may_see) if 0 <= index < len(run.candidates)]
        if len(runs) > 1:
            raise _ambiguous(trajectory_id, len(runs), f"groups have the id {group_id!r}")
        if runs:
            return await self._returned(runs[0], index, runs[0].runner.abort(index))
        for group in self._provenance.find(group_id, may_see):
            if group.group_id == group_id and 0 <= index < len(group.candidates):
                raise _ended(trajectory_id, group.candidates[index])
        return await self._abort_request(trajectory_id, may_see)

    async def _abort_request(self, name: str, may_see: Callable[[str | None], bool]) -> AbortedTrajectory:
        """Abort the single request that has this name."""
        alone = self._rollouts.singles.find(name, may_see)
        joined = self._rollouts.joiner.find(name, may_see)
        if len(alone) + len(joined) > 1:
            raise _ambiguous(name, len(alone) + len(joined), "requests have this id")
        for request in joined:
            if request.index is None:
                raise Conflict(FIELD, f"the trajectory of {name!r} has ended, and waits for the others of its group")
            return await self._returned(request.run, request.index, request.abort())
        for single in alone:
            return await self._abort_single(single)
        raise NotFound(
            FIELD,
            f"there is no running trajectory {name!r} of yours; it is GROUP:INDEX, as in the events of a batch and in "
            "GET /darts/v1/live, or the X-Request-Id of a request for one trajectory",
        )

    async def _returned(
        self, run: GroupRun[RequestT, OutputT], index: int, aborting: "asyncio.Future[OutputT | None]"
    ) -> AbortedTrajectory:
        """Wait until a candidate of a group is aborted."""
        output = await asyncio.shield(aborting)  # others may have aborted the same trajectory
        trajectory_id, record = f"{run.spec.group_id}:{index}", run.candidate_record(index)
        if output is None:
            raise _ended(trajectory_id, record)
        return AbortedTrajectory(trajectory_id, await self._renderer.to_sample(output), record)

    async def _abort_single(self, single: SingleRequest) -> AbortedTrajectory:
        sample = await single.running.abort()
        if sample is None:
            raise Conflict(FIELD, f"{single.request_id!r} has ended, or has not reached the engine yet")
        spans = self._rollouts.singles.version_spans(single, len(sample.token_ids))
        record = CandidateRecord(
            index=0,
            tokens=len(sample.token_ids),
            finish_reason=None,
            selected_as=None,
            reason=DiscardReason.ABORTED,
            cut=False,
            started_at=None,
            ended_at=None,
            weight_version_start=spans[0][0] if spans else single.version,
            weight_version_end=self._rollouts.weight_version,
            version_spans=spans,
        )
        return AbortedTrajectory(single.request_id, sample, record)


def _ambiguous(name: str, count: int, what: str) -> Conflict:
    return Conflict(
        FIELD, f"{name!r} is ambiguous: {count} running {what}; send each request with an X-Request-Id of its own"
    )


def _ended(trajectory_id: str, record: CandidateRecord) -> Conflict:
    if record.reason is not None:
        how = f"was discarded ({record.reason})"
    elif record.cut:
        how = "was cut at the deadline of its group, which returns it"
    else:
        how = f"has finished ({record.finish_reason})"
    return Conflict(FIELD, f"{trajectory_id!r} {how}, and cannot be aborted any more")
