"""veRL: its agent loops sample from the server, in place of veRL's own `LLMServerClient`.

```python
# rollout.py; start veRL with actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout.Manager
from verl.experimental.agent_loop import AgentLoopManager
from darts_client.integrations.verl import served

Manager = served(AgentLoopManager, "http://127.0.0.1:8000")
```

Written for veRL 0.10.0.dev (August 2026). Its package is not needed to import this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from ._sampling import Sampler

T = TypeVar("T", bound=type)


@dataclass
class TokenOutput:
    """A stand-in for veRL's `TokenOutput` where veRL is not installed."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class LLMServerClient:
    """A stand-in for veRL's `LLMServerClient`. `generate` has its arguments and its result.

    Args:
        config: veRL's configuration. Without it, every request needs `max_tokens`.
        resumes: whether an aborted answer is continued, as by veRL's `FullyAsyncLLMServerClient`.
    """

    def __init__(
        self,
        config: Any,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        *,
        resumes: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.config = config
        self._sampler = Sampler(url, api_key, model, transport)
        self._resumes = resumes

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        priority: int = 0,
        **other: Any,
    ) -> Any:
        """Sample one turn of the trajectory `request_id`. veRL's `priority` is not used.

        Raises:
            ValueError: an argument is not served, such as images.
            DartsError: the request failed.
        """
        if unserved := sorted(name for name, value in other.items() if value):
            raise ValueError(f"{', '.join(unserved)}: only prompts of token ids are served")
        sampling = dict(sampling_params)
        with_logprobs = bool(sampling.pop("logprobs", False))
        # veRL uses either name.
        max_tokens = sampling.pop("max_tokens", None)
        max_new_tokens = sampling.pop("max_new_tokens", None)
        limit = max_tokens or max_new_tokens or self._max_tokens(len(prompt_ids))

        tokens: list[int] = []
        logprobs: list[float] = []
        while not tokens or len(tokens) < limit:
            sampling["max_tokens"] = limit - len(tokens)
            answer = await self._sampler.sample(
                [*prompt_ids, *tokens], sampling, logprobs=with_logprobs, session=str(request_id)
            )
            tokens += answer.token_ids
            logprobs += answer.token_logprobs
            if not self._resumes or answer.finish_reason != "abort":
                # veRL's loops do not read the finish reason.
                answer.check_finished()
                break
        return _output_class()(
            token_ids=tokens,
            log_probs=logprobs if with_logprobs else None,
            stop_reason="completed",
            extra_fields=dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps")),
        )

    def _max_tokens(self, prompt_tokens: int) -> int:
        """Return a whole response's limit, less if the prompt is longer than expected, as veRL's server does."""
        rollout = self.config.actor_rollout_ref.rollout
        response = int(rollout.response_length)
        total = int(rollout.prompt_length) + response
        return max(1, min(response, total - prompt_tokens))


def served(manager: T, url: str, api_key: str | None = None, model: str | None = None) -> T:
    """Return a subclass of veRL's `AgentLoopManager` (or `AgentLoopManagerTQ`) whose agent loops use the server."""

    class Served(manager):  # type: ignore[misc, valid-type]  # a class that only the caller has
        def __init__(self, config: Any, llm_client: Any, *args: Any, **named: Any) -> None:
            resumes = type(llm_client).__name__.startswith("FullyAsync")
            client = LLMServerClient(config, url, api_key, model, resumes=resumes)
            super().__init__(config, client, *args, **named)

    return Served  # type: ignore[return-value]  # a subclass of it


def _output_class() -> Any:
    try:
        from verl.workers.rollout.replica import TokenOutput as Output
    except ImportError:
        return TokenOutput
    return Output
