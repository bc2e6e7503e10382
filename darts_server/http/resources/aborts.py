"""``POST /darts/v1/trajectories/{id}:abort``: stop one trajectory, and get what it has generated."""

from typing import Any, Literal

from fastapi import APIRouter

from darts_server.http.resources.trajectories import GeneratedOut, generated_fields
from darts_server.rollout.aborting import TrajectoryAborter


class AbortedOut(GeneratedOut):
    """What a trajectory had generated when it was aborted."""

    finish_reason: Literal["abort"] = "abort"


def routes(aborter: TrajectoryAborter[Any, Any]) -> APIRouter:
    api = APIRouter()

    @api.post("/trajectories/{trajectory_id:path}:abort")  # callers' own request ids may have slashes
    async def abort(trajectory_id: str) -> AbortedOut:
        """Stop a running trajectory and return what it has generated. Its group goes on without it."""
        aborted = await aborter.abort(trajectory_id)
        return AbortedOut(**generated_fields(aborted.trajectory_id, aborted.sample, aborted.record))

    return api
