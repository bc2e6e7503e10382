"""Let vLLM's routes answer with log-probs that are written from arrays.

vLLM makes an answer in three steps for each token: an object, a field of a model, and JSON. Here vLLM makes the answer
with a placeholder for the log-probs of each choice, and the JSON of the log-probs replaces it. Streams, and answers
that need more than the arrays, are made as before.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
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
from darts_server.vllm.requests.logprob_json import (
    ArrayLogprobs,
    ChatForm,
    CompletionForm,
    Form,
    TokensForm,
    write_slices,
)

PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


def write_logprobs_from_arrays(application: FastAPI) -> None:
    """Change the routes of vLLM's application that answer with log-probs."""
    for route in application.routes:
        if isinstance(route, APIRoute) and route.path in PATHS and route.dependant.call is not None:
            route.dependant.call = _with_fragments(route.dependant.call)

    for attribute, method, make_form, make_model in (
        ("openai_serving_completion", "_create_completion_logprobs", make_completion_form, _completion_model),
        ("openai_serving_chat", "_create_chat_logprobs", make_chat_form, _chat_model),
        ("serving_tokens", "_create_tokens_logprobs", make_tokens_form, _chat_model),
    ):
        serving = getattr(application.state, attribute, None)
        if serving is not None:
            setattr(serving, method, _deferring(serving, getattr(serving, method), make_form, make_model))


def _with_fragments(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a route's handler that puts the JSON of log-probs into the answer of ``handler``."""

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
    """Replace each placeholder by its JSON, which is written in slices."""
    parts = []
    for placeholder, slices in fragments.items():
        before, found, body = body.partition(placeholder)
        if not found:
            raise RuntimeError("vLLM has changed the place of log-probs in its answers")
        parts.append(before)
        for text in slices:
            if text:
                parts.append(text.encode())
            await asyncio.sleep(0)
    return b"".join([*parts, body])


def _deferring(
    serving: Any,
    make: Callable[..., Any],
    make_form: Callable[[Any, Mapping[str, Any]], Form],
    make_model: Callable[[str], BaseModel],
) -> Callable[..., Any]:
    """Return a stand-in for the method ``make``, which makes the log-probs of one choice."""

    def create(token_ids: Any, top_logprobs: Any, **options: Any) -> Any:
        call = route_call.get()
        form = make_form(serving, options)
        if (
            call is None
            or call.fragments is None
            or not isinstance(top_logprobs, ArrayLogprobs)
            or (form.needs_texts and not top_logprobs.has_texts)
        ):
            return make(token_ids=token_ids, top_logprobs=top_logprobs, **options)
        # No text of the model can contain a name that is made only now.
        model = make_model(uuid4().hex)
        placeholder = json.dumps(model.model_dump(), separators=(",", ":")).encode()
        call.fragments[placeholder] = write_slices(top_logprobs, form)
        return model

    return create


def make_completion_form(serving: Any, options: Mapping[str, Any]) -> Form:
    top = None if options.get("logprob_token_ids") else options["num_output_top_logprobs"]
    return CompletionForm(top, _names_ids(serving, options))


def make_chat_form(serving: Any, options: Mapping[str, Any]) -> Form:
    return ChatForm(
        _count(options, least=0, returns_all=options.get("logprob_token_ids")), _names_ids(serving, options)
    )


def make_tokens_form(serving: Any, options: Mapping[str, Any]) -> Form:
    return TokensForm(_count(options, least=1))


def _count(options: Mapping[str, Any], least: int, returns_all: Any = None) -> int | None:
    """Return the number of top log-probs of a token that vLLM's route would answer, or None for all."""
    top = options.get("num_output_top_logprobs")
    if returns_all or top == -1:
        return None
    return 0 if top is None else max(top, least)


def _names_ids(serving: Any, options: Mapping[str, Any]) -> bool:
    chosen = options.get("return_as_token_id")
    return bool(serving.return_tokens_as_token_ids if chosen is None else chosen)


def _completion_model(name: str) -> BaseModel:
    return CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[name], top_logprobs=[])


def _chat_model(name: str) -> BaseModel:
    return ChatCompletionLogProbs(content=[ChatCompletionLogProbsContent(token=name)])
