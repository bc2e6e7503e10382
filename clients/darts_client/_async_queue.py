"""The queue: prompts in, groups out, each acknowledged once."""

import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from ._async_transport import AsyncTransport
from ._errors import DartsError, StatusError
from ._io import async_shield, async_sleep
from ._models import Group, parse_response
from ._prompts import drop_none, list_queue_prompts
from ._queue import (
    STREAM_EXPIRES_SECONDS,
    AckPayload,
    DroppedPayload,
    JobRecord,
    JobsPayload,
    Outcome,
    PutPayload,
    QueuedGroup,
    StreamPrompts,
    TakenGroupsPayload,
    leases_of,
    put_request,
)
from ._requests import API, quote_segment

PATH = f"{API}/queue"
# Proxies close connections that are silent for a minute.
WAIT_SECONDS = 20.0
# Between two polls that the server answers sooner than it was to wait, as it does while it shuts down.
POLL_SECONDS = 1.0
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
        expires_after: float | None = None,
        taken: int | None = None,
        idempotency_key: str | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Put prompts into a job; returns their ids. They are kept until their groups were acknowledged.

        Prompts have the forms that `rollouts` takes. One whose id is known to the job is not added again. Those of a
        higher `priority` start before others of the job.

        `groups_per_version`: how many groups the job's consumers take under each weight version; no more are started
        than can be handed out within `max_staleness` versions of their first token. `groups_ahead` are started in
        addition, and start again if they come too late. `weight` is the job's share of tokens. The job is deleted when
        it was not used for `expires_after` seconds. `taken` groups count as taken under the served weights from now on:
        0 after a restart of a trainer that took some and will not make the update that they were for.

        Overloaded while the queue has too many prompts, after some retries.
        """
        request = put_request(
            list_queue_prompts(prompts),
            job=job,
            group_size=group_size,
            max_tokens=max_tokens,
            ids=ids,
            temperature=temperature,
            seed=seed,
            policy=policy,
            logprobs=logprobs,
            priority=priority,
            groups_per_version=groups_per_version,
            max_staleness=max_staleness,
            groups_ahead=groups_ahead,
            weight=weight,
            expires_after=expires_after,
            taken=taken,
            idempotency_key=idempotency_key,
            **sampling,
        )
        response = await self._transport.request("POST", PATH, **request)
        return parse_response(PutPayload, response).ids

    async def take(
        self,
        count: int = 1,
        *,
        job: str = "default",
        wait: float = WAIT_SECONDS,
        lease_seconds: float | None = None,
    ) -> list[QueuedGroup]:
        """Take the next groups of a job: when there are `count`, or those that there are after `wait` seconds.

        A request whose answer was lost is sent again, and gets the same groups.
        """
        params = {"count": count, "job": job, "lease_seconds": lease_seconds}
        headers = {"Idempotency-Key": uuid4().hex}
        end, left = time.monotonic() + wait, wait
        while True:
            response = await self._transport.request(
                "GET", f"{PATH}/groups", params=drop_none({**params, "wait": left}), headers=headers
            )
            groups = parse_response(TakenGroupsPayload, response).build()
            if groups or (left := end - time.monotonic()) <= 0:
                return groups
            await async_sleep(min(left, POLL_SECONDS))
            left = max(0.0, end - time.monotonic())

    async def ack(self, groups: QueuedGroup | str | Iterable[QueuedGroup | str]) -> list[Outcome]:
        """Acknowledge groups, or leases: they are done for good. Returns for each what that did.

        "already": it was acknowledged before. "expired": it was handed out again, and must not be trained on twice.
        """
        leases = leases_of(groups)
        if not leases:
            return []
        response = await self._transport.request("POST", f"{PATH}/ack", json={"leases": leases})
        return [lease.outcome for lease in parse_response(AckPayload, response).leases]

    async def jobs(self) -> list[JobRecord]:
        """Return your jobs."""
        return parse_response(JobsPayload, await self._transport.request("GET", PATH)).jobs

    async def delete(self, job: str, *, owner: str | None = None) -> int:
        """Delete a job with its prompts and groups; returns how many it had. NotFound if there is none.

        `owner`: for admins, whose job, as in its `JobRecord`.
        """
        response = await self._transport.request("DELETE", _job_path(job), params=drop_none({"owner": owner}))
        return parse_response(DroppedPayload, response).dropped

    async def stream(
        self, prompts: Any, *, group_size: int, max_tokens: int, ahead: int = 256, **options: Any
    ) -> AsyncGenerator[Group]:
        """Yield a group for each prompt, in the order in which they are complete, from a job of its own.

        `prompts` may be an iterator without an end: `ahead` of them are in the queue at a time, or fewer while the
        server has no room for more. A group is acknowledged when the next one is requested. Of a group that failed
        `error` is set. `options` are those of `put`, but for `job`, `ids` and `idempotency_key`. At the end, whatever
        its cause, the job is deleted; after a `break` at once under `aclosing`. That of a process that is killed is
        deleted after `expires_after` seconds, six hours by default.

        There is no `carry`, as no prompt is left undecided: with `max_staleness=0`, `groups_per_version` and
        `groups_ahead` the slow ones start again under the next weights, as with `carry="restart"`.
        """
        if "carry" in options:
            raise TypeError(
                "a stream has no carry: it yields a group for every prompt; max_staleness=0 with groups_per_version "
                "and groups_ahead starts slow ones again under the next weights"
            )
        if own := options.keys() & {"job", "ids", "idempotency_key"}:
            raise TypeError(
                f"a stream has its own {', '.join(sorted(own))}; use queue.put and queue.take to choose them"
            )
        job = f"stream-{uuid4().hex}"
        options = {"expires_after": STREAM_EXPIRES_SECONDS} | options
        build = partial(put_request, job=job, group_size=group_size, max_tokens=max_tokens, **options)
        waiting = StreamPrompts(prompts, ahead, build)
        try:
            while True:
                if (put := waiting.next_put()) is not None:
                    try:
                        # Groups that this consumer takes make room, so it must not wait for room before.
                        response = await self._transport.request(
                            "POST", PATH, retry_overloaded=not waiting.in_queue, **put
                        )
                        waiting.put_accepted(parse_response(PutPayload, response).ids)
                    except StatusError as exc:
                        waiting.put_failed(exc)
                if waiting.is_over:
                    return
                wait = waiting.seconds_to_wait(WAIT_SECONDS)
                groups = await self.take(job=job, wait=wait)
                if not groups and waiting.is_check_due(WAIT_SECONDS):
                    waiting.check_held(sum(each.prompts for each in await self.jobs() if each.job == job))
                for taken in groups:
                    if waiting.is_new(taken.id):
                        yield taken.group
                    [outcome] = await self.ack(taken)
                    waiting.acknowledged(taken.id, outcome)
        finally:
            with async_shield(2 * DELETE_TIMEOUT):
                if (put := waiting.unanswered_put) is not None:
                    # With the same key it is served once: not after the deletion, which would create the job again.
                    with suppress(DartsError):
                        await self._transport.send("POST", PATH, timeout=DELETE_TIMEOUT, **put)
                with suppress(DartsError):
                    await self._transport.send("DELETE", _job_path(job), timeout=DELETE_TIMEOUT)


def _job_path(job: str) -> str:
    return f"{PATH}/jobs/{quote_segment(job)}"
