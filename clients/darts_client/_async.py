"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import httpx

from . import _calls
from ._batch import Batch
from ._concurrency import as_completed
from ._connection import AsyncConnection
from ._events import Event
from ._health import HEALTH_SECONDS, NOT_YET, Deadline
from ._models import Group
from ._progress import bar
from ._requests import Prompts, completion_request, split_prompts
from ._resources import AsyncGroupsApi, AsyncPolicyApi, AsyncPromptsApi, AsyncStateApi
from ._responses import first_model
from ._retries import Patience
from ._rewards import RewardCounts, Rewarded, Values, listed_rewards, portions
from ._rollouts import AsyncRollouts, any_event, whole_group
from ._rollouts_request import Chat, RolloutPrompts, RolloutsRequest, rollouts_request
from ._time_limit import TimeLimit
from ._votes import Score, Vote, Weights, vote_body
from ._weights import AsyncWeightsApi

ItemT = TypeVar("ItemT")


class AsyncClient:
    """A client of one server, with a pool of connections.

    ```python
    async with AsyncClient("http://localhost:8000") as client:
        async for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
            group.lengths
    ```

    `groups`, `prompts`, `policy` and `state` give and take what the server knows, `weights` what it samples with.

    `base_url` may end in `/v1` or not. Without `model` the first that the server lists is used. All times are seconds.
    `timeout` is for answers that come all at once, so it bounds their generation too; `connect_timeout` is for a
    connection, `idle_timeout` for the next sign of life on a stream. What is safe to ask again is asked up to `retries`
    times more. `transport` replaces the network, in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        connect_timeout: float = 10.0,
        idle_timeout: float = 60.0,
        retries: int = 5,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._model = model
        self._model_lookup = asyncio.Lock()
        patience = Patience(timeout, connect_timeout, idle_timeout, retries)
        self._connection = AsyncConnection(base_url, api_key, patience, transport)
        self.groups = AsyncGroupsApi(self._connection)
        self.prompts = AsyncPromptsApi(self._connection)
        self.policy = AsyncPolicyApi(self._connection)
        self.state = AsyncStateApi(self._connection)
        self.weights = AsyncWeightsApi(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._connection.aclose()

    async def health(self) -> None:
        """Return if the server is healthy; otherwise raise what is wrong, as a DartsError."""
        await self._probe(HEALTH_SECONDS)

    async def wait_until_healthy(self, timeout: float) -> None:
        """Return as soon as the server is healthy; TimedOut if it is not within `timeout` seconds."""
        deadline = Deadline(timeout)
        while True:
            try:
                return await self._probe(deadline.probe_seconds())
            except NOT_YET as exc:
                delay = deadline.delay_after(exc)
            await asyncio.sleep(delay)

    async def models(self) -> list[str]:
        """The ids of the models that the server serves, in its order."""
        return await self._connection.answer(_calls.models())

    async def completions(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | None = None,
        model: str | None = None,
        logprobs: bool = True,
        **sampling: Any,
    ) -> list[Group]:
        """`group_size` trajectories of each prompt, in one request: a group a prompt, in the order of the prompts.

        A prompt is text or token ids. `policy` names the server's shaping for this request, "off" for none. Any other
        of vLLM's sampling names goes through. Raises ProtocolError if the answer is not exactly the groups asked for.
        """
        request = completion_request(
            prompts,
            model=model or await self._default_model(),
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            policy=policy,
            logprobs=logprobs,
            sampling=sampling,
        )
        return await self._connection.answer(_calls.completions(request))

    async def stream_groups(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | None = None,
        model: str | None = None,
        logprobs: bool = True,
        concurrency: int = 64,
        **sampling: Any,
    ) -> AsyncGenerator[tuple[int, Group], None]:
        """Yield `(prompt_index, group)` as each group completes: one request a prompt, `concurrency` of them at a time.

        ```python
        async with aclosing(client.stream_groups(prompts, group_size=8, max_tokens=512)) as groups:
            async for prompt_index, group in groups: ...
        ```

        The first error ends the iteration, and its end cancels the requests still running. After a `break` that
        happens at once under `aclosing`, else some turns of the event loop later.
        """
        ask = partial(
            self.completions,
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            policy=policy,
            model=model or await self._default_model(),
            logprobs=logprobs,
            **sampling,
        )
        jobs = [partial(ask, [prompt]) for prompt in split_prompts(prompts)]
        async with aclosing(as_completed(jobs, concurrency=concurrency)) as answers:
            async for prompt_index, [group] in answers:
                yield prompt_index, replace(group, number=prompt_index)

    def rollouts(
        self,
        prompts: RolloutPrompts,
        *,
        group_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | Mapping[str, Any] | None = None,
        budget: int | None = None,
        num_groups: int | None = None,
        logprobs: bool = True,
        durable: bool = True,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        progress: bool = False,
        **sampling: Any,
    ) -> AsyncRollouts[Group]:
        """Yield each group of a batch as soon as it is complete; afterwards the iterator has `usage` and `unfinished`.

        ```python
        async with client.rollouts(prompts, group_size=8, max_tokens=512) as groups:
            async for group in groups: ...
        ```

        A prompt is text, token ids, a chat, or a `PromptSpec` with a key and metadata. `policy` is a name, or a mapping
        with `name` and settings to change for this batch; `budget` bounds the candidates of all prompts together. With
        `num_groups` the first that many groups are the batch. Any other of vLLM's sampling names goes through.

        A group that cannot be made is not yielded but listed in `failed`; if none can, its error is raised.

        A `durable` batch survives a lost connection: the iterator connects again and goes on after the last event.
        The same `idempotency_key` with the same arguments finds the same batch while the server keeps it. To leave the
        iterator early stops the batch on the server: at the end of `async with`, or when the task is cancelled.

        `timeout` bounds the seconds of the whole batch. `progress` draws a bar.
        """
        request = rollouts_request(
            prompts,
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=logprobs,
            sampling=sampling,
            policy=policy,
            budget=budget,
            num_groups=num_groups,
            chunk_tokens=None,
            durable=durable,
            idempotency_key=idempotency_key,
        )
        return self._batch(request, whole_group, timeout, progress)

    def stream_tokens(
        self,
        prompts: RolloutPrompts,
        *,
        group_size: int,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | Mapping[str, Any] | None = None,
        budget: int | None = None,
        num_groups: int | None = None,
        logprobs: bool = True,
        durable: bool = True,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        chunk_tokens: int = 100,
        progress: bool = False,
        **sampling: Any,
    ) -> AsyncRollouts[Event]:
        """Yield all that happens to a batch as typed events, tokens while the rest is still being generated.

        A candidate that may still belong to its group sends a `Delta` whenever it has `chunk_tokens` more. It ends in
        one `TrajectoryEvent` or `Discard`; then comes the `GroupEvent` with the whole group, and `Done` at the very
        end. A failed group is a `GroupEvent` whose group has an `error`. The other arguments are those of `rollouts`.
        """
        request = rollouts_request(
            prompts,
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            logprobs=logprobs,
            sampling=sampling,
            policy=policy,
            budget=budget,
            num_groups=num_groups,
            chunk_tokens=chunk_tokens,
            durable=durable,
            idempotency_key=idempotency_key,
        )
        return self._batch(request, any_event, timeout, progress)

    async def cancel(self, batch_id: str) -> bool:
        """Stop a batch, durable or not, whoever reads it. False if it had ended; NotFound if it is not known."""
        return await self._connection.answer(_calls.cancel(batch_id))

    async def rewards(self, of: Rewarded, values: Values | None = None) -> RewardCounts:
        """Tell what trajectories earned. Large lists go in several requests; those that come again change nothing.

        ```python
        await client.rewards(group, [1.0, 0.0])                             # or groups, with a list of lists
        await client.rewards({trajectory: 1.0})                             # or by trajectory_id
        await client.rewards([Reward(trajectory_id="group:3", reward=0.5, correct=True)])
        ```
        """
        counts = RewardCounts()
        for offset, some in portions(listed_rewards(of, values)):
            counts = counts.plus(await self._connection.answer(_calls.rewards(some)), offset)
        return counts

    async def vote(
        self,
        prompt: str | Sequence[int] | Chat,
        *,
        n: int,
        pattern: str | Sequence[str],
        max_tokens: int,
        weights: Weights = "majority",
        score: Score | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        logprobs: bool = False,
        key: str | None = None,
        **sampling: Any,
    ) -> Vote:
        """The answer that most of up to `n` trajectories of a prompt give; the rest is stopped once it is certain.

        ```python
        vote = await client.vote("7a-5b*4>", n=8, max_tokens=200, pattern="#([0-9])")
        vote.answer, vote.weights
        ```

        `pattern` says where the answer stands: a regular expression with one group, "boxed", or a list of the answers
        there may be. `weights` other than "majority" go by a `score`: "head", the server's quality head, or "logprob"
        and "lowest_logprob". Any other of vLLM's sampling names goes through.
        """
        body = vote_body(
            prompt,
            n=n,
            pattern=pattern,
            max_tokens=max_tokens,
            weights=weights,
            score=score,
            temperature=temperature,
            seed=seed,
            logprobs=logprobs,
            key=key,
            sampling=sampling,
        )
        return await self._connection.answer(_calls.vote(body))

    async def _default_model(self) -> str:
        async with self._model_lookup:
            self._model = self._model or first_model(await self.models())
            return self._model

    async def _probe(self, seconds: float) -> None:
        await self._connection.send("GET", "/health", timeout=seconds)

    def _batch(
        self,
        request: RolloutsRequest,
        pick: Callable[[Event], ItemT | None],
        timeout: float | None,
        progress: bool,
    ) -> AsyncRollouts[ItemT]:
        batch = Batch(request, self._connection.patience.retries, TimeLimit(timeout))
        return AsyncRollouts(self._connection, batch, pick, bar(progress, request.wanted))
