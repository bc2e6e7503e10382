"""Requests for one trajectory that vLLM serves by itself, so that their callers can abort them."""

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from darts_server.types import Sample
from darts_server.vllm.outputs import token_logprobs


class VllmSingle:
    """Implements :class:`darts_server.rollout.singles.RunningRequest`. ``request_id``: as it was sent to vLLM."""

    def __init__(self, llm: AsyncLLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id

    def tokens(self) -> int | None:
        found = self._find()
        return None if found is None or found[1].detokenizer is None else found[1].detokenizer.num_output_tokens()

    async def abort(self) -> Sample | None:
        found = self._find()
        if found is None:
            return None
        internal_id, state = found
        sample = _sample(state)
        # vLLM ends the request in this turn of the event loop, so its caller is answered with the same tokens.
        await self._llm.abort([internal_id], internal=True)
        return sample

    def _find(self) -> tuple[str, RequestState] | None:
        """Find the request by vLLM's own id; ``None`` before the engine has it, and after its end."""
        processor = self._llm.output_processor
        for internal_id in processor.external_req_ids.get(self._request_id, ()):
            if (state := processor.request_states.get(internal_id)) is not None:
                return internal_id, state
        return None


def _sample(state: RequestState) -> Sample | None:
    if state.detokenizer is None:
        return None
    tokens = list(state.detokenizer.output_token_ids)
    logprobs = None if state.logprobs_processor is None else state.logprobs_processor.logprobs
    values = None if logprobs is None else token_logprobs(logprobs, tokens)
    return Sample(tokens, values, state.detokenizer.get_next_output_text(finished=True, delta=False), None)
