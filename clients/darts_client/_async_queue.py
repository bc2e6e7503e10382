"""The queue: prompts in, groups out, each acknowledged once."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any
from uuid import uuid4

from ._async_transport import AsyncTransport
from ._errors import DartsError
from ._io import async_shield
from ._models import Group, parse_response
from ._prompts import drop_none, list_queue_prompts
from ._queue import (
    AckPayload,
    DroppedPayload,
    JobRecord,
    JobsPayload,
    Outcome,
    PutPayload,
    QueuedGroup,
    TakenGroupsPayload,
    leases_of,
    put_body,
)
from ._requests import API, quote_segment

# Proxies close connections that are silent for a minute.
WAIT_SECONDS = 20.0
DELETE_TIMEOUT = 5.0


class AsyncQueueApi:
    """Prompts that the server generates groups for while the caller does something else.

    ```python
    await client.queue.put(prompts, group_size=8, max_tokens=512, job="train", groups_per_version=64, max_staleness=1)
    for taken in await client.queue.take(64, job="train", wait=60):
        taken.group.lengths
        await client.queue.ack(taken)
    ```
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def put(
        self,
        prompts: Any,
        *,
        group_size: int,
        max_tokens: int,
        job: str = "default",
        ids: Sequence[str] | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | Mapping[str, Any] | None = None,
        logprobs: bool = True,
        priority: int = 0,
        groups_per_version: int | None = None,
        max_staleness: int | None = None,
        groups_ahead: int | None = None,
        weight: float | None = None,
        idempotency_key: str | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Put prompts into a job; returns their ids. They are kept until their groups were acknowledged.

        Prompts have the forms that `rollouts` takes. One whose id is known to the job is not added again. Those of a
        higher `priority` start before others of the job.

        `groups_per_version`: how many groups the job's consumers take under each weight version; no more are started
        than can be handed out within `max_staleness` versions of their first token. `groups_ahead` are started in
        addition, and start again if they come too late. `weight` is the job's share of tokens.

        Overloaded while the queue has too many prompts, after some retries.
        """
        body = put_body(
            list_queue_prompts(prompts),
            ids,
            {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": logprobs or None}
            | sampling,
            policy,
            job=job,
            group_size=group_size,
            priority=priority,
            groups_per_version=groups_per_version,
            max_staleness=max_staleness,
            groups_ahead=groups_ahead,
            weight=weight,
        )
        headers = {"Idempotency-Key": idempotency_key or uuid4().hex}
        response = await self._transport.request("POST", f"{API}/queue", json=body, headers=headers)
        return parse_response(PutPayload, response).ids

    async def take(
        self,
        count: int = 1,
        *,
        job: str = "default",
        wait: float = WAIT_SECONDS,
        lease_seconds: float | None = None,
    ) -> list[QueuedGroup]:
        """Take the next groups of a job: when there are `count`, or those that there are after `wait` seconds."""
        params = drop_none({"count": count, "job": job, "wait": wait, "lease_seconds": lease_seconds})
        response = await self._transport.request("GET", f"{API}/queue/groups", params=params)
        return parse_response(TakenGroupsPayload, response).build()

    async def ack(self, groups: QueuedGroup | str | Iterable[QueuedGroup | str]) -> list[Outcome]:
        """Acknowledge groups, or leases: they are done for good. Returns for each what that did.

        "already": it was acknowledged before. "expired": it was handed out again, and must not be trained on twice.
        """
        leases = leases_of(groups)
        if not leases:
            return []
        response = await self._transport.request("POST", f"{API}/queue/ack", json={"leases": leases})
        return [lease.outcome for lease in parse_response(AckPayload, response).leases]

    async def jobs(self) -> list[JobRecord]:
        """Return your jobs."""
        return parse_response(JobsPayload, await self._transport.request("GET", f"{API}/queue")).jobs

    async def delete(self, job: str) -> int:
        """Delete a job with its prompts and groups; returns how many it had. NotFound if there is none."""
        response = await self._transport.request("DELETE", _job_path(job))
        return parse_response(DroppedPayload, response).dropped

    async def stream(
        self, prompts: Any, *, group_size: int, max_tokens: int, ahead: int = 256, **options: Any
    ) -> AsyncGenerator[Group]:
        """Yield a group for each prompt, in the order in which they are complete, from a job of its own.

        `prompts` may be an iterator without an end: `ahead` of them are in the queue at a time. A group is acknowledged
        when the next one is asked for. Of a group that failed `error` is set. `options` are those of `put`. At the end,
        whatever its cause, the job is deleted; after a `break` at once under `aclosing`.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        job, waiting, in_queue = f"stream-{uuid4().hex}", list_queue_prompts(prompts), 0
        try:
            while True:
                if new := list(islice(waiting, ahead - in_queue)):
                    await self.put(new, group_size=group_size, max_tokens=max_tokens, job=job, **options)
                    in_queue += len(new)
                if not in_queue:
                    return
                for taken in await self.take(job=job):
                    yield taken.group
                    await self.ack(taken)
                    in_queue -= 1
        finally:
            with suppress(DartsError), async_shield(DELETE_TIMEOUT):
                await self._transport.send("DELETE", _job_path(job), timeout=DELETE_TIMEOUT)


def _job_path(job: str) -> str:
    return f"{API}/queue/jobs/{quote_segment(job)}"
