"""One budget for a batch that is divided: how many candidates each prompt gets is decided on one server for all."""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from darts_server.ingress.batches.request import Batch
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import WholeAnswer, fetch

logger = logging.getLogger(__name__)

PATH = "/darts/v1/rollouts/plan"
PLAN_SECONDS = 30.0
"""Timeout for all servers together, which are tried one after another. After that they decide for their parts."""
EVEN_SECONDS = 10.0
"""How long it is remembered that prompts of a policy are not weighed against each other. Settings may change."""
MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Grants:
    """Candidates of each prompt of a batch, by its number, and how many are wanted on average."""

    candidates: Sequence[int]
    mean: float

    def cohort(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return the fields of the cohort for the part with these prompts."""
        return {"candidates": [self.candidates[number] for number in numbers], "mean_candidates": self.mean}

    def total(self, numbers: Sequence[int]) -> int:
        """Return the candidates of these prompts."""
        return sum(self.candidates[number] for number in numbers)


class Planner:
    """Asks servers how many candidates the prompts of batches get."""

    def __init__(self) -> None:
        self._even: dict[str, float] = {}

    async def plan(self, batch: Batch, outgoing: Outgoing, members: Sequence[Member]) -> Grants | None:
        """Return the grants of a batch; ``None`` where each server decides for its part.

        So it is where prompts are not weighed against each other, and if no server says how many: what is wrong with
        the batch will be said by those that run it.
        """
        terms = json.dumps([batch.fields.get(name) for name in ("policy", "group_size")], sort_keys=True)
        if time.monotonic() < self._even.get(terms, 0.0):
            return None
        request = replace(outgoing, target=PATH, body=batch.whole())
        try:
            async with asyncio.timeout(PLAN_SECONDS):
                answer = await _ask(sorted(members, key=lambda each: each.load), request)
        except TimeoutError:
            logger.warning("no server planned a batch within %.0f s: each decides for its part", PLAN_SECONDS)
            return None
        if answer is None or answer.status != HTTPStatus.OK:
            return None
        if (grants := _read(answer, len(batch.prompts))) is None:
            self._remember(terms)
        return grants

    def _remember(self, terms: str) -> None:
        self._even[terms] = time.monotonic() + EVEN_SECONDS
        while len(self._even) > MAX_REMEMBERED:
            del self._even[next(iter(self._even))]


async def _ask(members: Sequence[Member], request: Outgoing) -> WholeAnswer | None:
    """Return the answer of the first server that has one; ``None`` if none has, for example as all of them stop."""
    for member in members:
        try:
            async with member.in_use():
                answer = await fetch(member.replica, request)
        except ReplicaFailure as error:
            logger.info("%s did not plan a batch: %s", member.name, error)
            continue
        if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return answer
    return None


def _read(answer: WholeAnswer, prompts: int) -> Grants | None:
    """Return what a server has planned; ``None`` if it is nothing that can be used."""
    with suppress(ValueError, KeyError, TypeError):
        body: Mapping[str, Any] = json.loads(answer.body)
        grants = Grants([int(each) for each in body["candidates"]], float(body["mean_candidates"]))
        return grants if len(grants.candidates) == prompts else None
    return None
