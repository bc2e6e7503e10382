"""Routes of our own API, under ``/darts/v1``."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header

from darts_server.exceptions import NotFound, Unauthorized
from darts_server.http.wire import GroupAnswer, GroupsAnswer, PromptAnswer
from darts_server.rollout.prompts import Prompts
from darts_server.rollout.provenance import Provenance


def router(provenance: Provenance, prompts: Prompts, keys: Sequence[str]) -> APIRouter:
    """The routes. ``keys``: any of these opens them; none leaves them open, as vLLM does with its own."""
    api = APIRouter(prefix="/darts/v1", tags=["darts"], dependencies=[Depends(guard(keys))])

    @api.get("/groups/{group_id}")
    async def groups(group_id: str) -> GroupsAnswer:
        """Provenance of a group, or of all groups of a response: every candidate's length and fate."""
        records = provenance.find(group_id)
        if not records:
            raise NotFound("group_id", f"no group {group_id!r} is kept; only the latest are, and only shaped ones")
        return GroupsAnswer(groups=[GroupAnswer.of(record) for record in records])

    @api.get("/prompts/{prompt_key}")
    async def prompt(prompt_key: str) -> PromptAnswer:
        """What is known of a prompt's lengths. Its key is told with its groups."""
        stats = prompts.stats(prompt_key)
        if stats is None:
            raise NotFound("prompt_key", f"no prompt {prompt_key!r} is known; GET /darts/v1/groups/ID tells keys")
        return PromptAnswer(prompt_key=prompt_key, **asdict(stats))

    return api


def guard(keys: Sequence[str]) -> Callable[..., Any]:
    """Asks for ``Authorization: Bearer KEY``; compares in constant time."""
    digests = [_digest(key) for key in keys]

    async def check(authorization: Annotated[str, Header()] = "") -> None:
        scheme, _, key = authorization.partition(" ")
        given = _digest(key)
        known = [secrets.compare_digest(given, digest) for digest in digests]
        if digests and not (scheme.lower() == "bearer" and any(known)):
            raise Unauthorized("send the header Authorization: Bearer KEY, with a key the server was started with")

    return check


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
