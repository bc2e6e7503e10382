"""Read from vLLM's requests which trajectory they belong to, and from its outputs the answers."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.policies import OFF
from darts_server.rollout.turns.chat_history import ChatHistory
from darts_server.rollout.turns.turns import Turn, Turns
from darts_server.types import RequestOptions
from darts_server.vllm.prompt_request import PromptRequest

SCORING_FIELDS = ("prompt_logprobs", "prompt_logprob_token_ids")


def make_turn(
    request: PromptRequest,
    history: ChatHistory | None,
    shaping: RequestOptions,
    session: str | None,
    caller: str | None,
) -> Turn:
    """``session``: by a header that trainers send. ``caller``: the key's name.

    Evaluation has no sessions: trainers name those by prompts' numbers too, and training's first prompts would look
    like later turns of them.
    """
    prompt, params = request.prompt, request.params
    name = shaping.session or request.options.get("session_id") or session
    is_greedy = params.temperature == 0
    return Turn(
        (prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None) or (),
        history,
        None if is_greedy or shaping.policy == OFF else name,
        opens_session=shaping.session is not None,
        greedy=is_greedy,
        scoring=_is_scoring(params),
        caller=caller or "",
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
                if completion.finish_reason is None and not is_delta:
                    continue
                tokens, texts = earlier.pop(completion.index, ([], [])) if is_delta else ([], [])
                tokens.extend(completion.token_ids)
                texts.append(completion.text)
                if (reason := completion.finish_reason) is not None:
                    turns.add_answer(turn, tokens, "".join(texts), aborted=reason == "abort")
                else:
                    earlier[completion.index] = tokens, texts
            yield output


def _is_scoring(params: SamplingParams) -> bool:
    return params.max_tokens == 1 or any(getattr(params, name, None) is not None for name in SCORING_FIELDS)
