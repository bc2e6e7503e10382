"""The client that blocks."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import httpx

from . import _calls
from ._batch import Batch
from ._connection import Connection
from ._events import Event
from ._health import HEALTH_SECONDS, NOT_YET, Deadline
from ._models import Group
from ._progress import bar
from ._requests import Prompts, completion_request
from ._resources import GroupsApi, PolicyApi, PromptsApi, StateApi
from ._responses import first_model
from ._retries import Patience
from ._rewards import RewardCounts, Rewarded, Values, listed_rewards, portions
from ._rollouts import Rollouts, any_event, whole_group
from ._rollouts_request import Chat, RolloutPrompts, RolloutsRequest, rollouts_request
from ._time_limit import TimeLimit
from ._votes import Score, Vote, Weights, vote_body
from ._weights import WeightsApi

ItemT = TypeVar("ItemT")


class Client:
    """A client of one server, with a pool of connections.

    ```python
    with Client("http://localhost:8000") as client:
        for group in client.rollouts(["1 + 1 =", "2 + 2 ="], group_size=8, max_tokens=512):
            group.lengths
    ```

    The arguments are those of `AsyncClient`.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._model = model
        patience = Patience(timeout, connect_timeout, idle_timeout, retries)
        self._connection = Connection(base_url, api_key, patience, transport)
        self.groups = GroupsApi(self._connection)
        self.prompts = PromptsApi(self._connection)
        self.policy = PolicyApi(self._connection)
        self.state = StateApi(self._connection)
        self.weights = WeightsApi(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def health(self) -> None:
        """Return if the server is healthy; otherwise raise what is wrong, as a DartsError."""
        self._probe(HEALTH_SECONDS)

    def wait_until_healthy(self, timeout: float) -> None:
        """Return as soon as the server is healthy; TimedOut if it is not within `timeout` seconds."""
        deadline = Deadline(timeout)
        while True:
            try:
                return self._probe(deadline.probe_seconds())
            except NOT_YET as exc:
                delay = deadline.delay_after(exc)
            time.sleep(delay)

    def models(self) -> list[str]:
        """The ids of the models that the server serves, in its order."""
        return self._connection.answer(_calls.models())

    def completions(
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
        """`group_size` trajectories of each prompt, in one request; see `AsyncClient.completions`."""
        request = completion_request(
            prompts,
            model=model or self._default_model(),
            group_size=group_size,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            policy=policy,
            logprobs=logprobs,
            sampling=sampling,
        )
        return self._connection.answer(_calls.completions(request))

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
    ) -> Rollouts[Group]:
        """Yield each group of a batch as soon as it is complete; see `AsyncClient.rollouts`."""
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
    ) -> Rollouts[Event]:
        """Yield all that happens to a batch as typed events; see `AsyncClient.stream_tokens`."""
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

    def cancel(self, batch_id: str) -> bool:
        """Stop a batch, durable or not, whoever reads it. False if it had ended; NotFound if it is not known."""
        return self._connection.answer(_calls.cancel(batch_id))

    def rewards(self, of: Rewarded, values: Values | None = None) -> RewardCounts:
        """Tell what trajectories earned; see `AsyncClient.rewards`."""
        counts = RewardCounts()
        for offset, some in portions(listed_rewards(of, values)):
            counts = counts.plus(self._connection.answer(_calls.rewards(some)), offset)
        return counts

    def vote(
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
        """The answer that most of up to `n` trajectories of a prompt give, as `AsyncClient.vote`."""
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
        return self._connection.answer(_calls.vote(body))

    def _default_model(self) -> str:
        self._model = self._model or first_model(self.models())
        return self._model

    def _probe(self, seconds: float) -> None:
        self._connection.send("GET", "/health", timeout=seconds)

    def _batch(
        self,
        request: RolloutsRequest,
        pick: Callable[[Event], ItemT | None],
        timeout: float | None,
        progress: bool,
    ) -> Rollouts[ItemT]:
        batch = Batch(request, self._connection.patience.retries, TimeLimit(timeout))
        return Rollouts(self._connection, batch, pick, bar(progress, request.wanted))
