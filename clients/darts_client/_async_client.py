"""The client: one method for each kind of request."""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from math import ceil
from typing import Any, Literal, Self, TypeVar

import httpx

from ._async_resources import AsyncGroupsApi, AsyncPolicyApi, AsyncPromptsApi, AsyncStateApi, AsyncWeightsApi
from ._async_rollouts import AsyncRollouts
from ._async_transport import AsyncTransport
from ._batch import Batch, batch_options, read_batch
from ._completions import completion_request, first_model, parse_groups, parse_models
from ._errors import StatusError, TimedOut
from ._io import AsyncLock, async_sleep
from ._models import Event, Group, WireModel, parse_response
from ._progress import ProgressBar
from ._prompts import Prompts, RolloutPrompt, RolloutPrompts, drop_none, iterate_prompts, prompt_body
from ._requests import (
    API,
    HEALTH_POLL_INTERVAL,
    HEALTH_TIMEOUT,
    STARTING_ERRORS,
    TimeLimit,
    TransportOptions,
    batch_path,
)
from ._rewards import RewardCounts, Rewarded, Values, as_rewards, rewards_body, split_rewards
from ._rollouts import Carry, RolloutsRequest, rollouts_request
from ._session_groups import AsyncSessionsApi
from ._stream import ROLLOUTS, BatchReader, completed_group
from ._votes import Score, Vote, Weights, check_vote

ItemT = TypeVar("ItemT")
STREAM_BATCHES = 4
# They leave prompts to a later batch, or belong to a single batch.
SINGLE_BATCH_OPTIONS = {"num_groups", "carry", "carried", "idempotency_key"}


class _Cancelled(WireModel):
    cancelled: bool


class AsyncClient:
    """A client of one server, with a pool of connections.

    ```python
    async with AsyncClient("http://localhost:8000") as client:
        async for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
            group.lengths
    ```

    Args:
        base_url: URL of the server, with or without `/v1`.
        model: model for `completions`, by default the first that the server lists.
        timeout: seconds for a response that is not streamed, including its generation.
        connect_timeout: seconds for a connection.
        idle_timeout: seconds for the next bytes of a stream.
        retries: number of retries where a retry is safe.
        transport: replaces the network in tests.
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
        self._model_lock = AsyncLock()
        options = TransportOptions(timeout, connect_timeout, idle_timeout, retries)
        self._transport = AsyncTransport(base_url, api_key, options, transport)
        self.groups = AsyncGroupsApi(self._transport)
        self.prompts = AsyncPromptsApi(self._transport)
        self.policy = AsyncPolicyApi(self._transport)
        self.state = AsyncStateApi(self._transport)
        self.weights = AsyncWeightsApi(self._transport)
        self.sessions = AsyncSessionsApi(self._transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def health(self) -> None:
        """Raise a DartsError unless the server is healthy."""
        await self._transport.send("GET", "/health", timeout=HEALTH_TIMEOUT)

    async def wait_until_healthy(self, timeout: float) -> None:
        """Wait until the server is healthy. Raise TimedOut after `timeout` seconds."""
        limit = TimeLimit(timeout)
        while True:
            # The last probe, too, gets enough time to succeed.
            probe_timeout = max(limit.shorten(HEALTH_TIMEOUT), HEALTH_POLL_INTERVAL)
            try:
                await self._transport.send("GET", "/health", timeout=probe_timeout)
                return
            except STARTING_ERRORS as exc:
                if limit.is_over:
                    raise TimedOut(f"not healthy after {timeout:g} s, last answer: {exc}") from exc
            await async_sleep(limit.shorten(HEALTH_POLL_INTERVAL))

    async def models(self) -> list[str]:
        """Return the ids of the models that the server serves, in its order."""
        return parse_models(await self._transport.request("GET", "/v1/models"))

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text format."""
        response = await self._transport.request("GET", "/metrics")
        return response.text

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
        """Return a group of `group_size` trajectories for each prompt (text or token ids). Plain vLLM works, too.

        Args:
            policy: name of the server's policy, or "off".
            sampling: vLLM's other parameters. The defaults are neutral, whatever the model's `generation_config` says.

        Raises:
            ProtocolError: the answer does not have exactly these groups.
        """
        if not model:
            # Requests that start at the same time look the model up once.
            async with self._model_lock:
                if not self._model:
                    self._model = first_model(await self.models())
            model = self._model
        sampling |= {"max_tokens": max_tokens, "temperature": temperature} | drop_none({"seed": seed})
        request = completion_request(
            prompts,
            model=model,
            group_size=group_size,
            policy=policy,
            logprobs=logprobs,
            sampling=sampling,
        )
        # A second request would sample again, so it is sent only if the first never reached the server.
        response = await self._transport.request(
            "POST",
            "/v1/completions",
            idempotent=False,
            json=request.body,
            headers=request.headers,
        )
        return parse_groups(request, response)

    def rollouts(
        self,
        prompts: RolloutPrompts,
        *,
        group_size: int,
        max_tokens: int | None,
        temperature: float = 1.0,
        seed: int | None = None,
        policy: str | Mapping[str, Any] | None = None,
        budget: int | None = None,
        num_groups: int | None = None,
        survivors: bool | None = None,
        carry: Carry | None = None,
        carried: bool = False,
        verifier: Sequence[str] | Literal[False] | None = None,
        only: Literal["informative"] | None = None,
        max_prompts: int | None = None,
        return_zero_variance: bool = False,
        stop_when: Literal["decided"] | None = None,
        logprobs: bool = True,
        durable: bool = True,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        progress: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **sampling: Any,
    ) -> AsyncRollouts[Group]:
        """Yield each group of a batch as soon as it is complete.

        ```python
        async with client.rollouts(prompts, group_size=8, max_tokens=512) as groups:
            async for group in groups: ...
        groups.usage, groups.unfinished, groups.failed
        ```

        If you leave the iterator early, the end of `async with` cancels the batch. A failed group is in `failed` and is
        not yielded. If all groups fail, the first error is raised.

        Args:
            prompts: texts, token ids, chats, or `PromptSpec` with a key and metadata.
            max_tokens: length limit in tokens. None allows all tokens that a prompt leaves of the model's length.
            policy: name of a policy, or a mapping with `name` and settings that this batch overrides.
            budget: maximum number of candidates of all prompts together.
            num_groups: number of complete groups that end the batch, by default all.
            survivors: whether a group has all unpruned trajectories instead of `group_size`. The default under `arrol`.
            carry: fate of prompts without a group. "drop" forgets them. "restart" and "resume" keep them, and start
                them first in a later batch with `carry` that has them. "resume" keeps their tokens, too.
            carried: whether to run all kept prompts. They are numbered after `prompts`, which may be empty.
            verifier: names of the server's verifiers that give rewards, by default all, or False for none.
            only: "informative" does not count groups whose rewards are all equal. Other prompts take their places. This
                is dynamic sampling, which biases the gradient.
            max_prompts: number of prompts that may run under `only`.
            return_zero_variance: whether groups that do not count are yielded, too.
            stop_when: "decided" ends a group as soon as its rewards are not all equal. Its weights are None.
            durable: whether the batch survives a lost connection. The iterator reconnects.
            idempotency_key: the same key and arguments return the same batch while the server keeps it.
            timeout: seconds for the whole batch.
            progress: whether to draw a bar.
            chat_template_kwargs: vLLM's option for all chats, such as `{"enable_thinking": False}`. `tools`,
                `add_generation_prompt` and `continue_final_message` are vLLM's, too. A `PromptSpec` overrides them.
            sampling: vLLM's other parameters, such as `top_p`.
        """
        request = rollouts_request(
            prompts,
            "groups",
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            policy=policy,
            budget=budget,
            num_groups=num_groups,
            survivors=survivors,
            carry=carry,
            carried=carried,
            verifier=verifier,
            only=only,
            max_prompts=max_prompts,
            return_zero_variance=return_zero_variance,
            stop_when=stop_when,
            logprobs=logprobs,
            durable=durable,
            idempotency_key=idempotency_key,
            chat_template_kwargs=chat_template_kwargs,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **sampling,
        )
        return self._prepare_batch(request, completed_group, timeout, progress)

    def stream_tokens(
        self,
        prompts: RolloutPrompts,
        *,
        group_size: int,
        max_tokens: int | None,
        chunk_tokens: int = 100,
        timeout: float | None = None,
        progress: bool = False,
        **options: Any,
    ) -> AsyncRollouts[Event]:
        """Yield the events of a batch, with tokens as they are generated.

        A candidate that may still be selected sends a `Delta` for every `chunk_tokens` tokens. It ends with one
        `TrajectoryEvent` or `Discard`. `GroupEvent` has the whole group, or its `error`. `Done` is last. See `rollouts`
        for `options`.
        """
        request = rollouts_request(
            prompts,
            "tokens",
            group_size=group_size,
            max_tokens=max_tokens,
            chunk_tokens=chunk_tokens,
            **options,
        )
        return self._prepare_batch(request, lambda event: event, timeout, progress)

    async def stream(
        self,
        prompts: Any,
        *,
        group_size: int,
        max_tokens: int | None,
        ahead: int = 256,
        **options: Any,
    ) -> AsyncGenerator[Group]:
        """Yield a group for each prompt, while the server works on the next `ahead` prompts.

        ```python
        async with aclosing(client.stream(prompts, group_size=8, max_tokens=512)) as groups:
            async for group in groups: ...
        ```

        `prompts` may be an endless iterator. They run in batches of a quarter of `ahead`, and groups of earlier batches
        are yielded first. A failed group has an `error`. See `rollouts` for `options`.
        """
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}")
        if refused := sorted(options.keys() & SINGLE_BATCH_OPTIONS):
            raise TypeError(f"a stream yields a group for every prompt of many batches: it has no {', '.join(refused)}")
        remaining_prompts = iterate_prompts(prompts)
        max_batches = min(ahead, STREAM_BATCHES)
        batch_size = ceil(ahead / STREAM_BATCHES)
        batches: deque[AsyncRollouts[Group]] = deque()
        try:
            while True:
                # The engine works on later batches while the first waits for its slowest group, or for its reader.
                while len(batches) < max_batches:
                    batch_prompts = list(islice(remaining_prompts, batch_size))
                    if not batch_prompts:
                        break
                    batch = self.rollouts(
                        batch_prompts,
                        group_size=group_size,
                        max_tokens=max_tokens,
                        **options,
                    )
                    batches.append(batch)
                    await batch.start()
                if not batches:
                    return
                oldest = batches[0]
                try:
                    async for group in oldest:
                        yield group
                except StatusError:
                    # A batch that has ended raises only if all its groups failed, and they are yielded below.
                    has_ended = oldest.usage is not None
                    if not has_ended:
                        raise
                batches.popleft()
                for group in oldest.failed:
                    yield group
        finally:
            for batch in batches:
                await batch.aclose()

    async def batch(
        self,
        prompts: RolloutPrompts,
        *,
        group_size: int,
        max_tokens: int | None,
        timeout: float | None = None,
        **options: Any,
    ) -> Batch:
        """Return all groups of a large batch in one answer, as tensors if the server can.

        ```python
        batch = await client.batch(prompts, group_size=8, max_tokens=512)
        batch.groups, batch.usage
        ```

        See `rollouts` for the arguments. `timeout` is the number of seconds for one request, by default the client's. A
        retry finds a durable batch again. If the caller is cancelled, the server cancels the batch a minute later.
        """
        request = rollouts_request(
            prompts,
            None,
            group_size=group_size,
            max_tokens=max_tokens,
            **options,
        )
        http_timeout = self._transport.options.request_timeout(timeout)
        response = await self._transport.request(
            "POST",
            ROLLOUTS,
            timeout=http_timeout,
            **batch_options(request),
        )
        return read_batch(request, response)

    async def cancel(self, batch_id: str) -> bool:
        """Cancel a batch. Return False if it was already complete.

        Raises:
            NotFound: the batch is unknown.
        """
        response = await self._transport.request("DELETE", batch_path(batch_id))
        return parse_response(_Cancelled, response).cancelled

    async def rewards(self, rewarded: Rewarded, values: Values | None = None) -> RewardCounts:
        """Report the rewards of trajectories. A trajectory keeps its first reward.

        ```python
        await client.rewards(group, [1.0, 0.0])
        await client.rewards([group], [[1.0, 0.0]])
        await client.rewards({trajectory: 1.0})
        await client.rewards([Reward(trajectory_id="group:3", reward=0.5, correct=True)])
        ```
        """
        counts = RewardCounts()
        for offset, rewards in split_rewards(as_rewards(rewarded, values)):
            # A repeated reward has no effect, so a retry is safe.
            response = await self._transport.request("POST", f"{API}/rewards", json=rewards_body(rewards))
            counts = counts.plus(parse_response(RewardCounts, response), offset)
        return counts

    async def vote(
        self,
        prompt: RolloutPrompt,
        *,
        n: int,
        pattern: str | Sequence[str],
        max_tokens: int | None,
        weights: Weights = "majority",
        score: Score | None = None,
        temperature: float = 1.0,
        seed: int | None = None,
        logprobs: bool = False,
        key: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        **sampling: Any,
    ) -> Vote:
        """Return the most frequent answer of up to `n` trajectories, as soon as it is certain.

        ```python
        vote = await client.vote("7a-5b*4>", n=8, max_tokens=200, pattern="#([0-9])")
        vote.answer, vote.weights
        ```

        Args:
            pattern: regular expression whose one group is the answer, "boxed", or a list of possible answers.
            weights: weight of a vote. All except "majority" need a `score`.
            score: "head" for the server's quality head, "logprob" or "lowest_logprob".
            sampling: vLLM's other parameters. See `rollouts` for the options of a chat.

        Raises:
            ValueError: `prompt` is a `PromptSpec` with metadata.
        """
        prompt_options = prompt_body(prompt)
        if "metadata" in prompt_options:
            raise ValueError("a vote has no metadata: leave it out of the PromptSpec, and keep it beside the vote")
        # The route names a text and token ids alike.
        for form in ("text", "token_ids"):
            if form in prompt_options:
                prompt_options["prompt"] = prompt_options.pop(form)
        if chat_template_kwargs is not None:
            prompt_kwargs = prompt_options.pop("chat_template_kwargs", {})
            chat_template_kwargs = {**chat_template_kwargs, **prompt_kwargs}
        optional_sampling = {"temperature": temperature, "seed": seed, "logprobs": logprobs or None}
        options = {
            "weights": weights,
            "score": score,
            "key": key,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        body = {
            "n": n,
            "pattern": pattern if isinstance(pattern, str) else {"choices": list(pattern)},
            "sampling": {"max_tokens": max_tokens} | drop_none(optional_sampling) | sampling,
            **drop_none(options),
            **prompt_options,
        }
        response = await self._transport.request(
            "POST",
            f"{API}/vote",
            idempotent=False,
            json=body,
        )
        return check_vote(body, parse_response(Vote, response))

    def _prepare_batch(
        self,
        request: RolloutsRequest,
        select_item: Callable[[Event], ItemT | None],
        timeout: float | None,
        progress: bool,
    ) -> AsyncRollouts[ItemT]:
        batch = BatchReader(request, self._transport.options.retries, TimeLimit(timeout))
        bar = ProgressBar(request.num_groups) if progress else None
        return AsyncRollouts(self._transport, batch, select_item, bar)
