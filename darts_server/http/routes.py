"""Routes of our own API, under ``/darts/v1``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends

from darts_server.exceptions import NotFound
from darts_server.http import policy, rollouts, state
from darts_server.http.access import guard
from darts_server.http.wire import GroupAnswer, GroupsAnswer, PromptAnswer
from darts_server.rollout.prompts import Prompts
from darts_server.rollout.provenance import Provenance
from darts_server.rollout.submission import Submissions


def router(
    provenance: Provenance,
    prompts: Prompts,
    store: state.State,
    control: policy.PolicyControl,
    submissions: Callable[[], Submissions[Any, Any]],
    keys: Sequence[str],
) -> APIRouter:
    """The routes.

    ``keys``: any of these opens them. None leaves them open, as vLLM does with its own, but for those that change the
    server: these are for this machine alone then.
    """
    api = APIRouter(prefix="/darts/v1", tags=["darts"], dependencies=[Depends(guard(keys))])

    @api.get("/groups/{group_id}")
    async def groups(group_id: str) -> GroupsAnswer:
        """Provenance of a group, or of all groups of a response: every candidate's length and fate."""
        records = provenance.find(group_id)
        if not records:
            raise NotFound("group_id", f"no group {group_id!r} is kept; only the latest are, and only shaped ones")
        return GroupsAnswer(groups=[GroupAnswer.of(record) for record in records])

    @api.get("/prompts/{prompt_key:path}")  # callers' own keys may have slashes
    async def prompt(prompt_key: str) -> PromptAnswer:
        """What is known of a prompt's lengths. Its key is told with its groups."""
        stats = prompts.stats(prompt_key)
        if stats is None:
            raise NotFound("prompt_key", f"no prompt {prompt_key!r} is known; GET /darts/v1/groups/ID tells keys")
        return PromptAnswer(prompt_key=prompt_key, **asdict(stats))

    api.include_router(rollouts.routes(submissions))
    api.include_router(state.routes(store, keys))
    api.include_router(policy.routes(control, keys))
    return api
