"""Read from vLLM's requests which trajectory they belong to, and from its outputs the answers."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.rollout.turns.chat_history import ChatHistory
from darts_server.rollout.turns.turns import Turn, Turns
from darts_server.vllm.prompt_request import PromptRequest

SCORING_FIELDS = ("prompt_logprobs", "prompt_logprob_token_ids")


def make_turn(
    request: PromptRequest,
    history: ChatHistory | None,
    own_session: str | None,
    session: str | None,
    caller: str | None,
) -> Turn:
    """``own_session``: by our own option. ``session``: by a header that trainers send. ``caller``: the key's name."""
    prompt, params = request.prompt, request.params
    name = own_session or request.options.get("session_id") or session
    return Turn(
        (prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None) or (),
        history,
        name,
        caller,
        opens_session=own_session is not None,
        greedy=params.temperature == 0,
        scoring=_is_scoring(params),
    )


async def remember_answers(
    turns: Turns, turn: Turn, request: PromptRequest, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    """Yield the outputs, and remember each answer before the caller gets its end."""
    is_delta = request.params.output_kind is RequestOutputKind.DELTA
    earlier: dict[int, tuple[list[int], list[str]]] = {}
    async with aclosing(outputs):
        async for output in outputs:
            for completion in output.outputs:
                tokens, texts = earlier.pop(completion.index, ([], [])) if is_delta else ([], [])
                tokens.extend(completion.token_ids)
                texts.append(completion.text)
                if completion.finish_reason is not None:
                    turns.add_answer(turn, tokens, "".join(texts))
                elif is_delta:
                    earlier[completion.index] = tokens, texts
            yield output


def _is_scoring(params: SamplingParams) -> bool:
    return params.max_tokens == 1 or any(getattr(params, name, None) is not None for name in SCORING_FIELDS)
