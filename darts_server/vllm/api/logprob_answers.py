"""Let vLLM's routes answer with log-probs that are written from arrays.

vLLM makes an answer in three steps for each token: an object, a field of a model, and JSON. Here vLLM makes the answer
with a placeholder for the log-probs of each choice, and the JSON of the log-probs replaces it. Streams, and answers
that need more than the arrays, are made as before.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial, wraps
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs, ChatCompletionLogProbsContent
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs

from darts_server.vllm.api.routes import Fragments, route_call
from darts_server.vllm.compat import answers_token_ids_as_texts
from darts_server.vllm.requests.logprob_json import (
    ArrayLogprobs,
    ChatForm,
    CompletionForm,
    Form,
    TokensForm,
    write_slices,
)
from darts_server.vllm.requests.outputs import ALL_TOKENS, slice_limiter

MakeForm = Callable[[Any, Mapping[str, Any]], Form]
"""Makes a form from vLLM's object of a route, and the options of its method that makes log-probs."""
MakeModel = Callable[[str], BaseModel]
"""Makes log-probs of one token with this text."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def write_logprobs_from_arrays(application: FastAPI) -> None:
    for route in application.routes:
        if isinstance(route, APIRoute) and route.path in PATHS and route.dependant.call is not None:
            route.dependant.call = _replace_placeholders_after(route.dependant.call)

    replaced_methods: list[tuple[str, str, MakeForm, MakeModel]] = [
        ("openai_serving_completion", "_create_completion_logprobs", make_completion_form, _make_completion_model),
        ("openai_serving_chat", "_create_chat_logprobs", make_chat_form, _make_chat_model),
    ]
    # Since vLLM 0.32, the token route names tokens by integers, and vLLM writes its log-probs.
    if answers_token_ids_as_texts():
        replaced_methods.append(("serving_tokens", "_create_tokens_logprobs", make_tokens_form, _make_chat_model))
    for attribute, method, make_form, make_model in replaced_methods:
        serving = getattr(application.state, attribute, None)
        if serving is not None:
            vllm_method = getattr(serving, method)
            setattr(serving, method, partial(_make_placeholder, serving, vllm_method, make_form, make_model))


def _replace_placeholders_after(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(handler)
    async def handle(raw_request: Request, **values: Any) -> Any:
        # `_make_placeholder` fills it while the handler makes the answer.
        fragments: Fragments = {}
        raw_request.state.darts_fragments = fragments
        response = await handler(raw_request=raw_request, **values)
        if fragments and isinstance(response, JSONResponse) and response.status_code == HTTPStatus.OK:
            response.body = await _replace_placeholders(bytes(response.body), fragments)
            response.headers["content-length"] = str(len(response.body))
        return response

    return handle


async def _replace_placeholders(body: bytes, fragments: Fragments) -> bytes:
    parts = []
    # In the order of the answer's choices.
    for name, (placeholder, slices) in fragments.items():
        before, found, after = body.partition(placeholder)
        if not found:
            if name.encode() in body:
                raise RuntimeError(f"this version of vLLM writes log-probs in another form than {placeholder!r}")
            # vLLM leaves out the log-probs of an answer whose reasoning is hidden.
            continue
        parts.append(before)
        async with slice_limiter:
            for text in slices:
                parts.append(text.encode())
                # Other tasks run between slices.
                await asyncio.sleep(0)
        body = after
    return b"".join([*parts, body])


def _make_placeholder(
    serving: Any,
    vllm_method: Callable[..., Any],
    make_form: MakeForm,
    make_model: MakeModel,
    **options: Any,
) -> Any:
    """Stand in for ``vllm_method``, which makes the log-probs of one choice."""
    call = route_call.get()
    logprobs = options["top_logprobs"]
    if call is None or call.fragments is None or not isinstance(logprobs, ArrayLogprobs):
        return vllm_method(**options)
    # Log-probs of the whole vocabulary are rare, and versions of vLLM answer them differently.
    if options["num_output_top_logprobs"] == ALL_TOKENS:
        return vllm_method(**options)
    form = make_form(serving, options)
    if form.needs_texts and not logprobs.deferred.has_texts:
        return vllm_method(**options)
    # No text of the model can contain a name that is made only now.
    name = uuid4().hex
    model = make_model(name)
    placeholder = json.dumps(model.model_dump(), separators=(",", ":")).encode()
    call.fragments[name] = placeholder, write_slices(logprobs, form)
    return model


def make_completion_form(serving: Any, options: Mapping[str, Any]) -> Form:
    # The sampled token comes in addition. Tokens that the caller has named are all returned.
    max_tops = None if options.get("logprob_token_ids") else options["num_output_top_logprobs"] + 1
    return CompletionForm(max_tops, _uses_token_ids(serving, options))


def make_chat_form(serving: Any, options: Mapping[str, Any]) -> Form:
    max_tops = None if options.get("logprob_token_ids") else options["num_output_top_logprobs"] or 0
    return ChatForm(max_tops, _uses_token_ids(serving, options))


def make_tokens_form(_: Any, options: Mapping[str, Any]) -> Form:
    requested_tops = options["num_output_top_logprobs"]
    # vLLM's token route answers 0 with one entry.
    return TokensForm(0 if requested_tops is None else max(requested_tops, 1))


def _uses_token_ids(serving: Any, options: Mapping[str, Any]) -> bool:
    # The request's choice, or else the server's flag.
    requested = options.get("return_as_token_id")
    return bool(serving.return_tokens_as_token_ids if requested is None else requested)


def _make_completion_model(name: str) -> BaseModel:
    return CompletionLogProbs(
        text_offset=[],
        token_logprobs=[],
        tokens=[name],
        top_logprobs=[],
    )


def _make_chat_model(name: str) -> BaseModel:
    return ChatCompletionLogProbs(content=[ChatCompletionLogProbsContent(token=name)])
