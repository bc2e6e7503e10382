"""Read from vLLM's requests which trajectory they belong to, and from its outputs the answers."""

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from darts_server.rollout.turns import Turn, Turns
from darts_server.types import OFF, RequestOptions
from darts_server.vllm.prompt_request import PromptRequest

SCORING_FIELDS = ("prompt_logprobs", "prompt_logprob_token_ids")
UNSTABLE_END = re.compile(r"\s*(?:<think>\s*(?:</think>\s*)?)?\Z")
"""What a template puts before an answer, and not there again when the answer has become a part of the chat: it begins
the reasoning, or leaves it out at once, and white space joins that of the answer in one token."""
LONGEST_END = 24
"""Tokens of it, at most."""


def make_turn(
    request: PromptRequest, shaping: RequestOptions, session: str | None, caller: str | None, tokenizer: Any = None
) -> Turn:
    """``session``: by a header that trainers send. ``caller``: the key's name. ``tokenizer``: the model's, if any.

    Evaluation has no sessions: trainers name those by prompts' numbers too, and training's first prompts would look
    like later turns of them.
    """
    prompt, params = request.prompt, request.params
    name = shaping.session or request.options.get("session_id") or session
    is_greedy = params.temperature == 0
    token_ids = (prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None) or ()
    return Turn(
        token_ids,
        None if tokenizer is None else count_stable(tokenizer, token_ids),
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
    earlier: dict[int, list[int]] = {}
    async with aclosing(outputs):
        async for output in outputs:
            for completion in output.outputs:
                if completion.finish_reason is None and not is_delta:
                    continue
                earlier.setdefault(completion.index, []).extend(completion.token_ids)
                if (reason := completion.finish_reason) is not None:
                    turns.add_answer(turn, earlier.pop(completion.index), aborted=reason == "abort")
            yield output


def count_stable(tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Return how many tokens of a prompt a later turn begins with: all but the end that templates render otherwise."""
    tail = list(token_ids[-LONGEST_END:])
    if not tail or min(tail) < 0:  # what stands for an image
        return len(token_ids)
    match = UNSTABLE_END.search(tokenizer.decode(tail))
    end = "" if match is None else match[0]
    count = 0
    for length in range(1, len(tail) + 1):
        text = tokenizer.decode(tail[-length:])
        if len(text) > len(end):
            break
        if end.endswith(text):
            count = length
    return len(token_ids) - count


def _is_scoring(params: SamplingParams) -> bool:
    return params.max_tokens == 1 or any(getattr(params, name, None) is not None for name in SCORING_FIELDS)
