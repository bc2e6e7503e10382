"""Read from vLLM's requests which trajectory they belong to."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from darts_server.rollout.turns import Turn
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
        scoring=params.max_tokens == 1 or any(getattr(params, name, None) is not None for name in SCORING_FIELDS),
        caller=caller or "",
    )


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
