"""OpenRLHF: its agent executors sample from the server, in place of the vLLM engine in their Ray actor.

```python
# agent.py; start OpenRLHF with --train.agent_func_path agent.py
from openrlhf.utils.agent import SingleTurnAgentExecutor
from darts_client.integrations.openrlhf import served

class Agent(SingleTurnAgentExecutor):
    def __init__(self):
        super().__init__("reward.py")  # as --reward.remote_url

AgentExecutor = served(Agent, "http://127.0.0.1:8000")
```

Written for OpenRLHF 0.11.0. Its package is not needed to import this module.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from ._sampling import SAMPLING, Sampler

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Logprob:
    """vLLM's `Logprob` of one token, with the field that executors read."""

    logprob: float


@dataclass(frozen=True)
class Completion:
    """vLLM's `CompletionOutput`, with the fields that executors read."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[dict[int, Logprob]] | None
    """For each token, a dictionary from its id to its log-prob."""
    index: int = 0


@dataclass(frozen=True)
class Output:
    """vLLM's `RequestOutput`, with the fields that executors read."""

    prompt_token_ids: list[int]
    outputs: list[Completion]


class HttpEngine:
    """A stand-in for the `llm_engine` of executors. `generate` has its arguments and its result."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._sampler = Sampler(url, api_key, model, transport)

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Output:
        """Sample one turn of a trajectory. `sampling_params` is vLLM's object.

        Raises:
            ValueError: an argument is not served, such as images.
            DartsError: the request failed.
        """
        if multi_modal_data:
            raise ValueError("multi_modal_data: only prompts of token ids are served")
        if (getattr(sampling_params, "n", None) or 1) != 1:
            raise ValueError(f"sampling_params.n must be 1, got {sampling_params.n}")
        with_logprobs = getattr(sampling_params, "logprobs", None) is not None
        values = {name: getattr(sampling_params, name, None) for name in SAMPLING}
        # vLLM's object has empty lists for parameters that are not set.
        sampling = {name: value for name, value in values.items() if value != []}

        answer = await self._sampler.sample(prompt_token_ids, sampling, logprobs=with_logprobs)
        # Executors do not read the finish reason.
        answer.check_finished()
        logprobs = None
        if with_logprobs:
            pairs = zip(answer.token_ids, answer.token_logprobs, strict=True)
            logprobs = [{token_id: Logprob(logprob)} for token_id, logprob in pairs]
        completion = Completion(list(answer.token_ids), answer.text, answer.finish_reason, logprobs)
        return Output(list(prompt_token_ids), [completion])


def served(
    executor: T,
    url: str,
    api_key: str | None = None,
    model: str | None = None,
) -> T:
    """Return a subclass of an OpenRLHF `AgentExecutor` that samples from the server."""
    engine = HttpEngine(url, api_key, model)

    class Served(executor):  # type: ignore[misc, valid-type]  # a class that only the caller has
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            if "llm_engine" not in kwargs:
                raise TypeError("execute() needs llm_engine as a keyword, as OpenRLHF's actor passes it")
            kwargs["llm_engine"] = engine
            return await super().execute(*args, **kwargs)

    return Served  # type: ignore[return-value]  # a subclass of it
