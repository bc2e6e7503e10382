"""Render prompts and sampling parameters of our own API for vLLM, and convert its outputs."""

import json
import secrets
from argparse import Namespace
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from typing import Any

from pydantic import ValidationError
from vllm import SamplingParams
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.engine.port import RequestTokens
from darts_server.exceptions import InvalidRequest, field_name
from darts_server.types import FinishReason, PromptSpec, Sample
from darts_server.vllm.compat import import_cli_args, load_chat_template, renderer_options
from darts_server.vllm.requests.outputs import ABORTED, TEXT, make_deferred_fields, sampled_logprobs
from darts_server.vllm.requests.prompt_request import PromptRequest
from darts_server.vllm.requests.sampling import REFUSALS, SamplingReader, find_field_of_error
from darts_server.vllm.requests.validation import PROMPT, check_group, check_request

TOO_LONG = ("input_tokens", "input_text")
"""Parameters that vLLM's errors name if a prompt is longer than the model's length."""


class VllmPromptRenderer:
    """Implements :class:`darts_server.engine.port.PromptRenderer`. ``args``: vLLM's flags."""

    def __init__(self, llm: AsyncLLM, args: Namespace) -> None:
        self._llm = llm
        self._chats = OnlineRenderer(
            llm.model_config,
            llm.renderer,
            request_logger=None,
            chat_template=load_chat_template(args.chat_template),
            chat_template_content_format=args.chat_template_content_format,
            default_chat_template_kwargs=import_cli_args().resolve_default_chat_template_kwargs(args),
            **renderer_options(args),
        )
        self._sampling = SamplingReader(llm.model_config.logprobs_mode)
        # Whether later groups of a prompt get the same random numbers. Set at the start of the server.
        self.reuses_streams = False
        # Callers cannot predict the seeds, which differ after each start.
        self._secret = secrets.token_hex(16)
        # Numbers of the running groups of each prompt, by its key.
        self._running_groups = defaultdict[str, set[int]](set)
        self.effective_sampling = self._sampling.resolve

    async def make_request(
        self,
        prompt: PromptSpec,
        sampling: Mapping[str, object],
        size: int,
        request_id: str,
    ) -> PromptRequest:
        params = self._sampling.read(sampling, size)
        # Render the prompt as vLLM's routes do: a chat by its template, token ids and text as they are.
        rendered: Any
        if prompt.messages is not None:
            rendered = await self._render_chat(prompt.messages, prompt.chat_options)
        else:
            renderer = self._llm.renderer
            try:
                unrendered = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
                parsed = parse_model_prompt(self._llm.model_config, unrendered)
                (rendered,) = await renderer.render_cmpl_async([parsed], renderer.default_cmpl_tok_params)
            except Exception as error:
                raise self._render_error(_prompt_field(prompt), error) from error
        prompt_tokens = len(rendered.get("prompt_token_ids") or ())
        _fit_max_tokens(params, prompt, prompt_tokens, self._llm.model_config.max_model_len)
        request = PromptRequest(rendered, params, request_id)

        # These errors name vLLM's fields, and the caller's fields are ours.
        try:
            check_request(self._llm.vllm_config, request)
            check_group(self._llm, request)
        except InvalidRequest as error:
            field = _prompt_field(prompt) if error.field == PROMPT else f"sampling.{error.field}"
            raise InvalidRequest(field, error.message) from error
        except REFUSALS as error:
            raise InvalidRequest(find_field_of_error(error, sampling) or _prompt_field(prompt), str(error)) from error
        return request

    async def _render_chat(self, messages: bytes, chat_options: bytes | None) -> Any:
        """Return the prompt that vLLM's chat route makes of the same fields.

        Raises:
            InvalidRequest: names the first option whose removal makes the chat renderable, or ``messages``.
        """
        for number, message in enumerate(json.loads(messages)):
            if not isinstance(message.get("role"), str):
                raise InvalidRequest(f"messages[{number}].role", 'must be a string, such as "user"')
        options = json.loads(chat_options or b"{}")
        if options.get("continue_final_message") and options.get("add_generation_prompt", True):
            raise InvalidRequest(
                "continue_final_message", 'needs "add_generation_prompt": false, as on vLLM\'s chat route; add that'
            )
        try:
            return await self._apply_template(messages, options)
        except ValidationError as error:
            first = error.errors(
                include_url=False,
                include_input=False,
                include_context=False,
            )[0]
            raise InvalidRequest(field_name(first["loc"]), first["msg"]) from error
        except Exception as error:
            # A chat template failed, or vLLM's parser on a message that lacks a field. The error names no option, so
            # leave out each option in turn.
            wrong_field = "messages"
            if not _is_too_long(error):
                for name in options:
                    others = {other: value for other, value in options.items() if other != name}
                    with suppress(Exception):
                        await self._apply_template(messages, others)
                        wrong_field = name
                        break
            raise self._render_error(wrong_field, error) from error

    async def _apply_template(self, messages: bytes, options: Mapping[str, Any]) -> Any:
        # vLLM's route refuses tools without a parser unless this is null. A batch needs no parser.
        request = ChatCompletionRequest(
            messages=[],
            tool_choice=None,
            **options,
        )
        # Not validated: pydantic collects all errors of all messages, for seconds. vLLM's parser checks what it needs.
        conversation = json.loads(messages)
        for message in conversation:
            # vLLM's route does the same while it validates.
            reasoning = message.pop("reasoning_content", None)
            if reasoning is not None and message.get("reasoning") is None:
                message["reasoning"] = reasoning
        request.messages = conversation
        rendered = await self._chats.render_chat(request)
        if isinstance(rendered, ErrorResponse):
            raise ValueError(rendered.error.message)
        _, prompts = rendered
        return prompts[0]

    def _render_error(self, field: str, error: Exception) -> InvalidRequest:
        if _is_too_long(error):
            # vLLM stops counting at the limit, and its message speaks of an answer of 0 tokens.
            limit = self._llm.model_config.max_model_len
            return InvalidRequest(
                field,
                f"has more than {limit - 1} tokens, and an answer needs one or more: the model's length is {limit}; "
                "shorten the prompt, or use a server with a larger --max-model-len",
            )
        if isinstance(error, REFUSALS):
            return InvalidRequest(field, str(error))
        return InvalidRequest(field, f"cannot be rendered for this model: {type(error).__name__}: {error}")

    def prompt_key(self, request: PromptRequest) -> str:
        return request.prompt_key

    def known_token_counts(self, request: PromptRequest) -> RequestTokens:
        return request.tokens

    def tail_seed(self, request: PromptRequest) -> Sequence[int] | None:
        return request.tail_seed

    @contextmanager
    def reuse_streams(self, request: PromptRequest) -> Iterator[None]:
        # The caller's seed decides the random numbers.
        if not self.reuses_streams or request.params.seed is not None:
            yield
            return
        # Later groups of the prompt get the same seed, but not groups that run at the same time. With the same random
        # numbers, answers resemble the earlier answers, and more of their drafts are accepted.
        running_numbers = self._running_groups[request.prompt_key]
        number = next(number for number in count() if number not in running_numbers)
        name = f"{self._secret} {number} {request.prompt_key}"
        request.reused_seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        running_numbers.add(number)
        try:
            yield
        finally:
            running_numbers.remove(number)
            if not running_numbers:
                del self._running_groups[request.prompt_key]

    def has_numbered_streams(self, request: PromptRequest) -> bool:
        return self.reuses_streams or request.params.seed is not None

    async def to_sample(self, output: RequestOutput) -> Sample:
        await make_deferred_fields(output, TEXT)
        completion = output.outputs[0]
        token_ids = array("i", completion.token_ids)
        values = sampled_logprobs(completion)
        logprobs = None if values is None else array("d", values)
        reason = None
        if completion.finish_reason != ABORTED:
            reason = FinishReason(completion.finish_reason or "")
        return Sample(token_ids, logprobs, completion.text, reason)


def _is_too_long(error: Exception) -> bool:
    return getattr(error, "parameter", None) in TOO_LONG


def _fit_max_tokens(
    params: SamplingParams,
    prompt: PromptSpec,
    prompt_tokens: int,
    model_length: int,
) -> None:
    """Check that prompt and answer fit into the model's length, and set ``max_tokens`` if the caller sends null.

    Raises:
        InvalidRequest: names the prompt, or a sampling parameter that fits no prompt.
    """
    # As on vLLM's routes, ``max_tokens`` is never lowered: a trainer would mistake a truncated answer for a whole one.
    if params.max_tokens is not None:
        answer_tokens = params.max_tokens
        name = "max_tokens"
        cause = (
            f"sampling.max_tokens is {answer_tokens} (16 if it is left out); shorten the prompt, lower max_tokens, or "
            "send null for what the prompt leaves"
        )
    else:
        answer_tokens = max(1, params.min_tokens)
        name = "min_tokens"
        cause = (
            f"an answer needs at least {answer_tokens}; shorten the prompt, or use a server with a larger "
            "--max-model-len"
        )
    if answer_tokens >= model_length:
        raise InvalidRequest(
            f"sampling.{name}", f"must be below the model's length of {model_length} tokens, got {answer_tokens}"
        )
    if prompt_tokens + answer_tokens > model_length:
        raise InvalidRequest(
            _prompt_field(prompt),
            f"has {prompt_tokens} tokens, and may have at most {model_length - answer_tokens}: the model's length is "
            f"{model_length}, and {cause}",
        )
    if params.max_tokens is None:
        params.max_tokens = model_length - prompt_tokens


def _prompt_field(prompt: PromptSpec) -> str:
    # A prompt has exactly one of these fields.
    return next(name for name in ("token_ids", "messages", "text") if getattr(prompt, name) is not None)
