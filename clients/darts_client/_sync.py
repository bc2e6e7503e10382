"""The client that blocks."""

import time
from typing import Any, Self

import httpx

from ._connection import Connection
from ._health import HEALTH_SECONDS, NOT_YET, Deadline
from ._models import Group
from ._requests import Prompts, completion_request
from ._responses import first_model, parse_groups, parse_models


class Client:
    """A client of one server, with a pool of connections.

    ```python
    with Client("http://localhost:8000") as client:
        [group] = client.completions("1 + 1 =", group_size=8, max_tokens=512)
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._model = model
        self._connection = Connection(base_url, api_key, timeout, transport)

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
        return parse_models(self._connection.send("GET", "/v1/models"))

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
        answer = self._connection.send("POST", "/v1/completions", json=request.body, headers=request.headers)
        return parse_groups(request, answer)

    def _default_model(self) -> str:
        self._model = self._model or first_model(self.models())
        return self._model

    def _probe(self, seconds: float) -> None:
        self._connection.send("GET", "/health", timeout=seconds)
