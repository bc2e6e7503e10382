"""Requests for one trajectory that vLLM serves by itself, so that their callers can abort them."""

from collections.abc import AsyncGenerator

from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from darts_server.types import Sample
from darts_server.vllm.new_states import change_new_states, changing_state
from darts_server.vllm.outputs import token_logprobs


class VllmSingle:
    """Implements :class:`darts_server.rollout.singles.RunningRequest`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._state: RequestState | None = None
        change_new_states(llm.output_processor)

    async def follow(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs, from the first, with which vLLM has added it."""
        with changing_state(self._set_state):
            first = await anext(outputs, None)
        if first is None:
            return
        yield first
        async for output in outputs:
            yield output

    def tokens(self) -> int | None:
        detokenizer = None if self._state is None else self._state.detokenizer
        return None if detokenizer is None else detokenizer.num_output_tokens()

    async def abort(self) -> Sample | None:
        states = self._llm.output_processor.request_states
        internal_id = next((name for name, state in states.items() if state is self._state), None)
        if internal_id is None:
            return None
        sample = _sample(states[internal_id])
        # vLLM ends the request in this turn of the event loop, so its caller is answered with the same tokens.
        await self._llm.abort([internal_id], internal=True)
        return sample

    def _set_state(self, state: RequestState) -> None:
        self._state = state


def _sample(state: RequestState) -> Sample | None:
    if state.detokenizer is None:
        return None
    tokens = list(state.detokenizer.output_token_ids)
    logprobs = None if state.logprobs_processor is None else state.logprobs_processor.logprobs
    values = None if logprobs is None else token_logprobs(logprobs, tokens)
    return Sample(tokens, values, state.detokenizer.get_next_output_text(finished=True, delta=False), None)
