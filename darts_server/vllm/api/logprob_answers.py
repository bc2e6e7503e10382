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
from darts_server.vllm.requests.outputs import ALL_TOKENS, one_at_a_time

MakeForm = Callable[[Any, Mapping[str, Any]], Form]
"""Makes a form from vLLM's object of a route, and the options of its method that makes log-probs."""
MakeModel = Callable[[str], BaseModel]
"""Makes log-probs of one token with this text."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def write_logprobs_from_arrays(application: FastAPI) -> None:
    """Change the routes of vLLM's application that answer with log-probs."""
    for route in application.routes:
        if isinstance(route, APIRoute) and route.path in PATHS and route.dependant.call is not None:
            route.dependant.call = _with_fragments(route.dependant.call)

    changes: list[tuple[str, str, MakeForm, MakeModel]] = [
        ("openai_serving_completion", "_create_completion_logprobs", make_completion_form, _completion_model),
        ("openai_serving_chat", "_create_chat_logprobs", make_chat_form, _chat_model),
    ]
    if answers_token_ids_as_texts():
        changes.append(("serving_tokens", "_create_tokens_logprobs", make_tokens_form, _chat_model))
    for attribute, method, make_form, make_model in changes:
        serving = getattr(application.state, attribute, None)
        if serving is not None:
            make = getattr(serving, method)
            setattr(serving, method, partial(_make_placeholder, serving, make, make_form, make_model))


def _with_fragments(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler that replaces the placeholders in the answer of ``handler``."""

    @wraps(handler)
    async def handle(raw_request: Request, **values: Any) -> Any:
        fragments: Fragments = {}
        raw_request.state.darts_fragments = fragments
        response = await handler(raw_request=raw_request, **values)
        if fragments and isinstance(response, JSONResponse) and response.status_code == HTTPStatus.OK:
            response.body = await _insert(bytes(response.body), fragments)
            response.headers["content-length"] = str(len(response.body))
        return response

    return handle


async def _insert(body: bytes, fragments: Fragments) -> bytes:
    """Replace each placeholder in an answer by its JSON."""
    parts = []
    for name, (placeholder, slices) in fragments.items():
        before, found, after = body.partition(placeholder)
        if not found:
            if name.encode() in body:
                raise RuntimeError(f"this version of vLLM writes log-probs in another form than {placeholder!r}")
            # vLLM leaves out the log-probs of an answer whose reasoning is hidden.
            continue
        parts.append(before)
        async with one_at_a_time:
            for text in slices:
                parts.append(text.encode())
                await asyncio.sleep(0)
        body = after
    return b"".join([*parts, body])


def _make_placeholder(
    serving: Any,
    make: Callable[..., Any],
    make_form: MakeForm,
    make_model: MakeModel,
    **options: Any,
) -> Any:
    """Stand in for vLLM's method ``make``, which makes the log-probs of one choice."""
    call = route_call.get()
    logprobs = options["top_logprobs"]
    if call is None or call.fragments is None or not isinstance(logprobs, ArrayLogprobs):
        return make(**options)
    # Log-probs of the whole vocabulary are rare, and versions of vLLM answer them differently.
    if options["num_output_top_logprobs"] == ALL_TOKENS:
        return make(**options)
    form = make_form(serving, options)
    if form.needs_texts and not logprobs.deferred.has_texts:
        return make(**options)
    # No text of the model can contain a name that is made only now.
    name = uuid4().hex
    model = make_model(name)
    placeholder = json.dumps(model.model_dump(), separators=(",", ":")).encode()
    call.fragments[name] = placeholder, write_slices(logprobs, form)
    return model


def make_completion_form(serving: Any, options: Mapping[str, Any]) -> Form:
    # The sampled token comes in addition.
    count = None if options.get("logprob_token_ids") else options["num_output_top_logprobs"] + 1
    return CompletionForm(count, _names_ids(serving, options))


def make_chat_form(serving: Any, options: Mapping[str, Any]) -> Form:
    count = None if options.get("logprob_token_ids") else options["num_output_top_logprobs"] or 0
    return ChatForm(count, _names_ids(serving, options))


def make_tokens_form(_: Any, options: Mapping[str, Any]) -> Form:
    top = options["num_output_top_logprobs"]
    return TokensForm(0 if top is None else max(top, 1))


def _names_ids(serving: Any, options: Mapping[str, Any]) -> bool:
    chosen = options.get("return_as_token_id")
    return bool(serving.return_tokens_as_token_ids if chosen is None else chosen)


def _completion_model(name: str) -> BaseModel:
    return CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[name], top_logprobs=[])


def _chat_model(name: str) -> BaseModel:
    return ChatCompletionLogProbs(content=[ChatCompletionLogProbsContent(token=name)])
