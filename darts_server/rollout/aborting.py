"""Abort one trajectory of a running group, and return what it has generated."""

import asyncio
from dataclasses import dataclass
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import Conflict, NotFound
from darts_server.records import CandidateRecord
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import caller
from darts_server.types import Sample

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
    """Abort trajectories by their ids, ``GROUP:INDEX``. ``provenance``: says how those that have ended did."""

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

        Raises:
            NotFound: the caller has no such trajectory.
            Conflict: it has ended, and the message says how; or several running groups of the caller have its id.
        """
        group_id, _, number = trajectory_id.rpartition(":")
        is_index = number.isascii() and number.isdecimal() and len(number) <= MAX_INDEX_DIGITS
        index = int(number) if is_index else -1
        may_see = caller.get().may_see
        runs = [run for run in self._rollouts.find(group_id, may_see) if 0 <= index < len(run.candidates)]
        if len(runs) > 1:
            raise Conflict(
                FIELD,
                f"{trajectory_id!r} is ambiguous: {len(runs)} running groups have the id {group_id!r}; send each "
                "request with an X-Request-Id of its own",
            )
        if runs:
            # Shielded, because others may have aborted the same trajectory.
            output = await asyncio.shield(runs[0].runner.abort(index))
            record = runs[0].candidate_record(index)
            if output is None:
                raise _ended(trajectory_id, record)
            return AbortedTrajectory(trajectory_id, await self._renderer.to_sample(output), record)
        for group in self._provenance.find(group_id, may_see):
            if group.group_id == group_id and 0 <= index < len(group.candidates):
                raise _ended(trajectory_id, group.candidates[index])
        raise NotFound(
            FIELD,
            f"there is no trajectory {trajectory_id!r} of yours; it is GROUP:INDEX, as in the events of a batch and in "
            "GET /darts/v1/live",
        )


def _ended(trajectory_id: str, record: CandidateRecord) -> Conflict:
    if record.reason is not None:
        how = f"was discarded ({record.reason})"
    elif record.cut:
        how = "was cut at the deadline of its group, which returns it"
    else:
        how = f"has finished ({record.finish_reason})"
    return Conflict(FIELD, f"{trajectory_id!r} {how}, and cannot be aborted any more")
