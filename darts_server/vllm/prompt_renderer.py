"""Render prompts and sampling parameters of our own API for vLLM, and convert its outputs."""

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.engine.port import RequestTokens
from darts_server.exceptions import InvalidRequest
from darts_server.types import FinishReason, PromptSpec, Sample
from darts_server.vllm.compat import load_chat_template
from darts_server.vllm.outputs import ABORTED, TEXT, make_deferred, sampled_logprobs
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.sampling import REFUSALS, SamplingReader, named_parameter
from darts_server.vllm.validation import PROMPT, check_group, check_request


class VllmPromptRenderer:
    """Implements :class:`darts_server.engine.port.PromptRenderer`.

    ``chat_template``: a template or the path of its file, as for vLLM's flag; ``None`` for the model's own.
    """

    def __init__(self, llm: AsyncLLM, chat_template: str | None = None) -> None:
        self._llm = llm
        self._chat = ChatParams(
            chat_template=load_chat_template(chat_template), chat_template_kwargs={"add_generation_prompt": True}
        )
        self._sampling = SamplingReader(llm.model_config.logprobs_mode)
        self.effective_sampling = self._sampling.effective

    async def make_request(
        self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str
    ) -> PromptRequest:
        params = self._sampling.read(sampling, size)
        # Render the prompt as vLLM's routes do: a chat by its template, token ids and text as they are.
        renderer = self._llm.renderer
        conversation: Any = None if prompt.messages is None else json.loads(prompt.messages)
        for number, message in enumerate(conversation or ()):
            if not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{number}].role", 'must be a string, such as "user"')
        rendered: Any
        try:
            if conversation is not None:
                _, (rendered,) = await renderer.render_chat_async([conversation], self._chat)
            else:
                given = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
                parsed = parse_model_prompt(self._llm.model_config, given)
                (rendered,) = await renderer.render_cmpl_async([parsed], renderer.default_cmpl_tok_params)
        except REFUSALS as error:
            raise InvalidRequest(_prompt_field(prompt), str(error)) from error
        except Exception as error:  # of a chat template, or of vLLM's parser on a message without what it needs
            reason = f"cannot be rendered for this model: {type(error).__name__}: {error}"
            raise InvalidRequest(_prompt_field(prompt), reason) from error
        _limit_answer(params, prompt, len(rendered.get("prompt_token_ids") or ()), self._llm.model_config.max_model_len)
        request = PromptRequest(rendered, params, request_id)
        # Check it before the first candidate starts; errors name the fields of our own API.
        try:
            check_request(self._llm.vllm_config, request)
            check_group(self._llm, request)
        except InvalidRequest as error:
            field = _prompt_field(prompt) if error.field == PROMPT else f"sampling.{error.field}"
            raise InvalidRequest(field, error.message) from error
        except REFUSALS as error:
            raise InvalidRequest(named_parameter(error, sampling) or _prompt_field(prompt), str(error)) from error
        return request

    def prompt_key(self, request: PromptRequest) -> str:
        return request.prompt_key

    def tokens(self, request: PromptRequest) -> RequestTokens:
        return request.tokens

    def tail_seed(self, request: PromptRequest) -> Sequence[int] | None:
        return request.tail_seed

    async def to_sample(self, output: RequestOutput) -> Sample:
        await make_deferred(output, TEXT)
        completion = output.outputs[0]
        tokens = array("i", completion.token_ids)  # batches are kept: a list takes nine times the memory
        values = sampled_logprobs(completion)
        logprobs = None if values is None else array("d", values)
        reason = None if completion.finish_reason == ABORTED else FinishReason(completion.finish_reason or "")
        return Sample(tokens, logprobs, completion.text, reason)


def _limit_answer(params: SamplingParams, prompt: PromptSpec, length: int, limit: int) -> None:
    """Check that prompt and answer fit into the model's length, and set ``max_tokens`` where the caller leaves it open.

    ``max_tokens`` is never made smaller, as on vLLM's completions and chats: a trainer that takes an answer of fewer
    tokens for a whole one would learn from a truncated one. ``length``: of the prompt. ``limit``: the model's length.

    Raises:
        InvalidRequest: names the prompt, unless it is the sampling parameter alone that does not fit.
    """
    if params.max_tokens is not None:
        needed = params.max_tokens
        name = "max_tokens"
        cause = (
            f"sampling.max_tokens is {needed} (16 if it is left out); shorten the prompt, lower max_tokens, or send "
            "null for what the prompt leaves"
        )
    else:
        needed = max(1, params.min_tokens)
        name = "min_tokens"
        cause = f"its answer has {needed} or more; shorten the prompt, or use a server with a larger --max-model-len"
    if needed >= limit:
        raise InvalidRequest(f"sampling.{name}", f"must be below the model's length of {limit} tokens, got {needed}")
    if length + needed > limit:
        raise InvalidRequest(
            _prompt_field(prompt),
            f"has {length} tokens, and may have at most {limit - needed}: the model's length is {limit}, and {cause}",
        )
    if params.max_tokens is None:
        params.max_tokens = limit - length


def _prompt_field(prompt: PromptSpec) -> str:
    """Return the name of the field that holds the prompt."""
    return next(name for name in ("token_ids", "messages", "text") if getattr(prompt, name) is not None)
