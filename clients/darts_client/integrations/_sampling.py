"""One trajectory by `/v1/completions`, for the modules of trainers that send token ids."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from .._async_transport import AsyncTransport
from .._completions import NEUTRAL, ChoiceLogprobs, first_model, parse_models
from .._errors import ProtocolError
from .._models import WireModel, parse_response
from .._requests import TransportOptions

TIMEOUT = 7200.0
"""Seconds for one trajectory: it may wait for its group, and for new weights."""

SAMPLING = frozenset(NEUTRAL) | {
    *("temperature", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("logit_bias", "vllm_xargs"),
}
"""vLLM's names of what a trainer may set. The server ignores names that it does not know."""


class Sampled(WireModel):
    """An answer. `finish_reason`: `stop`, `length`, or `abort` for the tokens so far of an aborted request.

    `prompt_tokens`: as the server counts them, also those of a text.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    prompt_tokens: int = 0

    @property
    def token_logprobs(self) -> list[float]:
        return [] if self.logprobs is None else list(self.logprobs.token_logprobs)

    def check_finished(self) -> None:
        """Raise ProtocolError for the beginning of an answer, which must not be trained on as a whole one."""
        if self.finish_reason not in ("stop", "length"):
            raise ProtocolError(f"the answer has finish reason {self.finish_reason!r}, not stop or length")


class _Usage(WireModel):
    prompt_tokens: int


class _Completion(WireModel):
    choices: list[Sampled]
    usage: _Usage


@dataclass
class Sampler:
    """Samples from the server at `url`. It can be pickled: connections are opened where it is used.

    `model`: default is the first that the server lists. `transport`: for tests.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    transport: httpx.AsyncBaseTransport | None = None

    def __post_init__(self) -> None:
        self._open: tuple[asyncio.AbstractEventLoop, AsyncTransport] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    async def sample(
        self,
        prompt: Sequence[int] | str,
        sampling: Mapping[str, Any],
        *,
        logprobs: bool = True,
        session: str | None = None,
        request_id: str | None = None,
    ) -> Sampled:
        """Sample one trajectory, or one turn of it.

        `sampling`: by vLLM's names, with `max_tokens`; None stands for vLLM's neutral value. `session`: the
        trajectory's name.

        Raises:
            ValueError: a parameter is unknown.
            DartsError
        """
        given = {name: value for name, value in sampling.items() if value is not None}
        if unknown := sorted(given.keys() - SAMPLING):
            raise ValueError(f"sampling has {', '.join(unknown)}, which is not served; remove it")
        if "max_tokens" not in given:
            raise ValueError("sampling needs max_tokens")
        body: dict[str, Any] = {
            "model": await self._model(),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n": 1,
            "return_token_ids": True,
            **NEUTRAL,
            **given,
        }
        body |= {"logprobs": 0} if logprobs else {}
        body |= {} if request_id is None else {"request_id": request_id}
        headers = {} if session is None else {"X-Session-ID": session}
        response = await self.request("POST", "/v1/completions", json=body, headers=headers)
        completion = parse_response(_Completion, response)
        choices = completion.choices
        if len(choices) != 1:
            raise ProtocolError(f"expected one choice, got {len(choices)}")
        if logprobs and len(choices[0].token_logprobs) != len(choices[0].token_ids):
            raise ProtocolError(
                f"the answer has {len(choices[0].token_ids)} tokens but {len(choices[0].token_logprobs)} log-probs"
            )
        return choices[0].model_copy(update={"prompt_tokens": completion.usage.prompt_tokens})

    async def aclose(self) -> None:
        """Close the connections. The next request opens others."""
        if self._open is not None:
            await self._open[1].aclose()
            self._open = None

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send any request. Raises DartsError."""
        loop = asyncio.get_running_loop()
        if self._open is None or self._open[0] is not loop:  # connections belong to the loop that opened them
            options_of_all = TransportOptions(timeout=TIMEOUT)
            self._open = loop, AsyncTransport(self.url, self.api_key, options_of_all, self.transport)
        return await self._open[1].request(method, path, idempotent=method == "GET", **options)

    async def _model(self) -> str:
        self.model = self.model or first_model(parse_models(await self.request("GET", "/v1/models")))
        return self.model
