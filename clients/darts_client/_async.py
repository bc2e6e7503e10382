"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Self

import httpx

from ._concurrency import as_completed
from ._connection import AsyncConnection
from ._health import HEALTH_SECONDS, NOT_YET, Deadline
from ._models import Group
from ._requests import Prompts, completion_request, split_prompts
from ._responses import first_model, parse_groups, parse_models


class AsyncClient:
    """A client of one server, with a pool of connections.

    ```python
    async with AsyncClient("http://localhost:8000") as client:
        [group] = await client.completions("1 + 1 =", group_size=8, max_tokens=512)
    ```

    `base_url` may end in `/v1` or not. Without `model` the first that the server lists is used. `timeout`, in seconds,
    bounds the generation too, for an answer comes all at once at its end. `transport` replaces the network, in tests.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._model = model
        self._model_lookup = asyncio.Lock()
        self._connection = AsyncConnection(base_url, api_key, timeout, transport)

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
        return parse_models(await self._connection.send("GET", "/v1/models"))

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
        answer = await self._connection.send("POST", "/v1/completions", json=request.body, headers=request.headers)
        return parse_groups(request, answer)

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
                yield prompt_index, group

    async def _default_model(self) -> str:
        async with self._model_lookup:
            self._model = self._model or first_model(await self.models())
            return self._model

    async def _probe(self, seconds: float) -> None:
        await self._connection.send("GET", "/health", timeout=seconds)
