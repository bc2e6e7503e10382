"""Prompts and sampling parameters of our own API as vLLM's, and its outputs as ours."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from vllm import SamplingParams
from vllm.entrypoints.chat_utils import load_chat_template
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import InvalidRequest
from darts_server.types import FinishReason, PromptSpec, Sample
from darts_server.vllm.compat.engine import REFUSALS
from darts_server.vllm.outputs import logprobs_of
from darts_server.vllm.platform import refuse_what_would_crash
from darts_server.vllm.prompt_request import PromptRequest
from darts_server.vllm.validation import check_prompt

OURS = frozenset({"n", "output_kind", "extra_args", "skip_clone", "stream_interval"})
"""Sampling parameters that this server sets itself."""
LOGPROBS = "logprobs"


class VllmPromptRenderer:
    """Implements :class:`darts_server.engine.port.PromptRenderer`.

    ``chat_template``: the one that the server was started with, or a file that has it; ``None`` for the model's own.
    """

    def __init__(self, llm: AsyncLLM, chat_template: str | None = None) -> None:
        self._llm = llm
        self._chat = ChatParams(
            chat_template=load_chat_template(chat_template), chat_template_kwargs={"add_generation_prompt": True}
        )
        self._defaults = llm.model_config.get_diff_sampling_param()
        self._known = sorted(set(signature(SamplingParams.from_optional).parameters) - OURS)

    async def make_request(
        self, prompt: PromptSpec, sampling: Mapping[str, object], size: int, request_id: str
    ) -> PromptRequest:
        params = self._params(sampling, size)
        refuse_what_would_crash(self._llm.vllm_config, params)
        rendered = await self._rendered(prompt)
        params.max_tokens = self._room(rendered, params.max_tokens)
        request = PromptRequest(rendered, params, request_id)
        try:
            check_prompt(self._llm, request)
        except REFUSALS as error:
            raise InvalidRequest(_named(error, sampling) or _field(prompt), str(error)) from error
        return request

    def prompt_key(self, request: PromptRequest) -> str:
        return request.prompt_key

    def tail_seed(self, request: PromptRequest) -> Sequence[int] | None:
        return request.tail_seed

    def to_sample(self, output: RequestOutput) -> Sample:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = None if completion.logprobs is None else logprobs_of(completion.logprobs, tokens)
        return Sample(tokens, logprobs, completion.text, FinishReason(completion.finish_reason or ""))

    # --- sampling parameters ------------------------------------------------

    def _params(self, sampling: Mapping[str, object], size: int) -> SamplingParams:
        for name in sampling:
            if name not in self._known:
                what = "is set by this server" if name in OURS else "is unknown"
                raise InvalidRequest(f"sampling.{name}", f"{what}; known ones are {', '.join(self._known)}")
        values: dict[str, Any] = {**self._defaults, **sampling}
        if values.get(LOGPROBS) is True:
            values[LOGPROBS] = 0  # that of the token itself
        try:
            params = SamplingParams.from_optional(n=1, output_kind=RequestOutputKind.FINAL_ONLY, **values)
        except REFUSALS as error:
            named = _named(error, sampling) or _refused_alone(sampling) or "sampling"
            raise InvalidRequest(named, str(error)) from error
        params.n = size
        return params

    def _room(self, rendered: Any, asked: int | None) -> int:
        """``max_tokens`` that the model's context leaves."""
        left = self._llm.model_config.max_model_len - len(rendered.get("prompt_token_ids") or ())
        return left if asked is None else min(asked, left)

    # --- prompts ------------------------------------------------------------

    async def _rendered(self, prompt: PromptSpec) -> Any:
        renderer = self._llm.renderer
        try:
            if prompt.messages is not None:
                conversation: Any = [dict(message) for message in prompt.messages]
                _, (rendered,) = await renderer.render_chat_async([conversation], self._chat)
            else:
                given = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
                parsed = parse_model_prompt(self._llm.model_config, given)
                (rendered,) = await renderer.render_cmpl_async([parsed], renderer.default_cmpl_tok_params)
        except REFUSALS as error:
            raise InvalidRequest(_field(prompt), str(error)) from error
        return rendered


def _field(prompt: PromptSpec) -> str:
    return next(name for name in ("token_ids", "messages", "text") if getattr(prompt, name) is not None)


def _named(error: Exception, sampling: Mapping[str, object]) -> str | None:
    """The sampling parameter that vLLM's message speaks of, if it does of one that was given."""
    return next((f"sampling.{name}" for name in sampling if name in str(error)), None)


def _refused_alone(sampling: Mapping[str, object]) -> str | None:
    """The sampling parameter that vLLM refuses whatever the others are. Of a wrong type it does not tell the name."""
    for name, value in sampling.items():
        try:
            given: dict[str, Any] = {name: value}
            SamplingParams.from_optional(**given)
        except REFUSALS:
            return f"sampling.{name}"
    return None
