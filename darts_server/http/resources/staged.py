"""``/darts/v1/weights/staged``: switch to weights that were staged, or drop them."""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from darts_server.http.resources.weights import MAX_VERSION, RULE, WeightsAnswer, answer, rule_of
from darts_server.weights.rules import RuleName
from darts_server.weights.updates import Updates

Id = Annotated[str, Path(description="`staged.id` of the weights.")]


def routes(updates: Updates) -> APIRouter:
    api = APIRouter()

    @api.post("/weights/staged/{staged_id}:switch")
    async def switch(
        staged_id: Id,
        rule: Annotated[RuleName | None, Query(description=f"{RULE} Overrides that of the staging.")] = None,
        version: Annotated[
            int | None,
            Query(ge=0, le=MAX_VERSION, description="Version of the new weights; `staged.version` by default."),
        ] = None,
        keep_previous: Annotated[
            bool,
            Query(description="Whether the weights served until now are staged, so that they can be switched back."),
        ] = False,
    ) -> WeightsAnswer:
        """Serve staged weights, or change nothing. Responds when they are served."""
        await updates.staged.switch(staged_id, rule_of(rule), version, keep_previous=keep_previous)
        return answer(updates)

    @api.delete("/weights/staged/{staged_id}")
    async def drop(staged_id: Id) -> WeightsAnswer:
        """Remove staged weights."""
        updates.staged.drop(staged_id)
        return answer(updates)

    return api
