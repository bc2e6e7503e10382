"""One trajectory by `/v1/completions`, for the modules of trainers that send token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .._async_transport import AsyncTransport
from .._completions import NEUTRAL_SAMPLING, ChoiceLogprobs, first_model, parse_models
from .._errors import ProtocolError
from .._models import WireModel, parse_response
from .._prompts import drop_none
from .._requests import TransportOptions

TIMEOUT = 7200.0
"""Seconds for one trajectory. It may wait for its group, and for new weights."""

SAMPLING = frozenset(NEUTRAL_SAMPLING) | {
    "temperature",
    "max_tokens",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "vllm_xargs",
}
"""vLLM's sampling parameters that a trainer may set. The server ignores unknown names."""


class Sampled(WireModel):
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """`stop`, `length`, or `abort` if the request was aborted and the tokens are a beginning."""
    logprobs: ChoiceLogprobs | None = None
    prompt_tokens: int = 0
    """As the server counts."""

    @property
    def token_logprobs(self) -> list[float]:
        return [] if self.logprobs is None else list(self.logprobs.token_logprobs)

    def check_finished(self) -> None:
        """Raise ProtocolError for the beginning of an answer, because a trainer must not use it as a whole answer."""
        if self.finish_reason not in ("stop", "length"):
            raise ProtocolError(f"the answer has finish reason {self.finish_reason!r}, not stop or length")


class _Usage(WireModel):
    prompt_tokens: int


class _Completion(WireModel):
    choices: list[Sampled]
    usage: _Usage


@dataclass
class Sampler:
    """Samples from the server at `url`. It can be pickled, because connections are opened at the first request.

    The default `model` is the first model that the server lists. `transport` replaces the network in tests.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    transport: httpx.AsyncBaseTransport | None = None

    def __post_init__(self) -> None:
        self._connections: AsyncTransport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connections": None, "_loop": None}

    async def sample(
        self,
        prompt: Sequence[int] | str,
        sampling: Mapping[str, Any],
        *,
        logprobs: bool = True,
        session: str | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sampled:
        """Sample one trajectory, or one turn of it.

        Args:
            sampling: vLLM's parameters, with `max_tokens`. None means vLLM's neutral value.
            session: name of the trajectory.
            headers: further headers.

        Raises:
            ValueError: a parameter is unknown, or `max_tokens` is missing.
            DartsError: the request failed.
        """
        sampling = drop_none(sampling)
        if unknown := sorted(sampling.keys() - SAMPLING):
            raise ValueError(f"sampling has {', '.join(unknown)}, which is not served; remove it")
        if "max_tokens" not in sampling:
            raise ValueError("sampling needs max_tokens")
        if not self.model:
            self.model = first_model(parse_models(await self.request("GET", "/v1/models")))
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n": 1,
            "return_token_ids": True,
            **NEUTRAL_SAMPLING,
            **sampling,
        }
        if logprobs:
            # 0 requests the log-probs of the sampled tokens alone.
            body["logprobs"] = 0
        if request_id is not None:
            body["request_id"] = request_id
        request_headers = dict(headers or {})
        if session is not None:
            request_headers["X-Session-ID"] = session

        response = await self.request(
            "POST",
            "/v1/completions",
            json=body,
            headers=request_headers,
        )
        completion = parse_response(_Completion, response)
        if len(completion.choices) != 1:
            raise ProtocolError(f"expected one choice, got {len(completion.choices)}")
        answer = completion.choices[0]
        num_tokens = len(answer.token_ids)
        num_logprobs = len(answer.token_logprobs)
        if logprobs and num_logprobs != num_tokens:
            raise ProtocolError(f"the answer has {num_tokens} tokens but {num_logprobs} log-probs")
        return answer.model_copy(update={"prompt_tokens": completion.usage.prompt_tokens})

    async def aclose(self) -> None:
        """Close the connections. The next request opens new connections."""
        if self._connections is not None:
            await self._connections.aclose()
            self._connections = None

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send any request, and raise a DartsError if it fails."""
        # Connections belong to the event loop that opened them.
        loop = asyncio.get_running_loop()
        if self._connections is None or self._loop is not loop:
            options_of_all = TransportOptions(timeout=TIMEOUT)
            self._connections = AsyncTransport(self.url, self.api_key, options_of_all, self.transport)
            self._loop = loop
        return await self._connections.request(
            method,
            path,
            idempotent=method == "GET",
            **options,
        )
