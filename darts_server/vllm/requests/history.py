"""Keeps the answers of all requests, and sends them to engines that have not counted them.

Answers travel in the first request of a prompt to an engine. See `darts_server.drafts.history`.
"""

import asyncio
from array import array
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from darts_server.drafts.history import History, hash_prompt
from darts_server.vllm.engine_core.drafter import HISTORY

POLL_SECONDS = 5.0
"""Time between two polls of an engine. Each takes a millisecond of the engine."""
TIMES_EMPTIED = "darts_emptied_drafts"
ORIGIN = "darts_origin"
"""Attribute of a request's state in vLLM."""


class Origin(NamedTuple):
    """Where a request was sent, and whether it carries answers to the engine."""

    prompt_key: bytes
    engine: bytes
    carries_answers: bool


@dataclass(slots=True)
class EngineMemory:
    """What an engine has counted since it started or emptied its counts.

    ``incarnation``: the engine's connection, if it may start again. ``times_emptied``: of all its workers.
    """

    number: int
    incarnation: object
    times_emptied: int = 0


class RequestHistory:
    """Changes vLLM's client and output processor.

    ``model_version``: returns a value that changes with each update of weights and LoRA adapters.
    """

    def __init__(
        self,
        engine_core: Any,
        processor: OutputProcessor,
        history: History,
        model_version: Callable[[], object],
    ) -> None:
        self._core = engine_core
        self._states = processor.request_states
        self._history = history
        self._model_version = model_version
        self._memories: dict[bytes, EngineMemory] = {}
        self._memory_numbers = count(1)
        # Token ids and adapter of the latest prompt, and its key.
        self._latest: tuple[Any, str | None, bytes] | None = None

        self._vllm_send_input = engine_core._send_input
        engine_core._send_input = self._send_with_history
        changed: Any = processor
        self._vllm_finish_request = processor._finish_request
        changed._finish_request = self._finish_and_keep

    async def watch_engines(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # A worker empties its counts when they are full. Then its engine needs the answers again.
            engines = list(self._core.core_engines)
            calls = [
                self._core._call_utility_async(
                    "collective_rpc",
                    TIMES_EMPTIED,
                    None,
                    (),
                    None,
                    engine=engine,
                )
                for engine in engines
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            for engine, times_by_worker in zip(engines, results, strict=True):
                # The counts of a lost engine are gone anyway.
                if not isinstance(times_by_worker, BaseException):
                    self.record_emptied(engine, sum(times_by_worker))

    def record_emptied(self, engine: bytes, times_emptied: int) -> None:
        memory = self._memory_of(engine)
        if times_emptied != memory.times_emptied:
            # Under a new number the history counts nothing as sent, so the engine gets all answers again.
            self._memories[engine] = EngineMemory(next(self._memory_numbers), memory.incarnation, times_emptied)

    def _memory_of(self, engine: bytes) -> EngineMemory:
        # Engines of --replicas start again under the same name. vLLM's own engines do not.
        incarnation = getattr(self._core, "engines", {}).get(engine)
        memory = self._memories.get(engine)
        if memory is None or memory.incarnation is not incarnation:
            memory = self._memories[engine] = EngineMemory(next(self._memory_numbers), incarnation)
        return memory

    def _send_with_history(self, request_type: EngineCoreRequestType, request: Any, engine: bytes | None = None) -> Any:
        """Stand in for vLLM's ``_send_input``."""
        if engine is None:
            engine = self._core.core_engine
        if request_type is EngineCoreRequestType.ADD:
            request = self._add_history(request, engine)
        return self._vllm_send_input(request_type, request, engine)

    def _add_history(self, request: EngineCoreRequest, engine: bytes) -> EngineCoreRequest:
        params = request.sampling_params
        state = self._states.get(request.request_id)
        # A prompt of embeddings has no tokens that others could share. A ``resumable`` prompt is sent in parts.
        has_whole_prompt = request.prompt_embeds is None and not request.resumable
        if params is None or state is None or not state.prompt_token_ids or not has_whole_prompt:
            return request

        # The state of a resumed candidate has its true prompt, without generated tokens.
        adapter = None if request.lora_request is None else request.lora_request.lora_name
        key = self._key_of(state.prompt_token_ids, adapter)
        self._history.age_if_new_version(self._model_version())
        answers = self._history.take_unsent(key, self._memory_of(engine).number)
        setattr(state, ORIGIN, Origin(key, engine, bool(answers)))
        if not answers:
            return request
        # A copy, because the request may be sent to another engine later.
        changed = copy(request)
        changed.sampling_params = copy(params)
        changed.sampling_params.extra_args = {**(params.extra_args or {}), HISTORY: answers}
        return changed

    def _key_of(self, token_ids: Any, adapter: str | None) -> bytes:
        # Candidates of a group are sent one after the other, and have the same list of token ids.
        if self._latest is not None:
            latest_token_ids, latest_adapter, latest_key = self._latest
            if token_ids is latest_token_ids and adapter == latest_adapter:
                return latest_key
        key = hash_prompt(token_ids, adapter)
        self._latest = (token_ids, adapter, key)
        return key

    def _finish_and_keep(self, state: RequestState) -> None:
        """Stand in for vLLM's ``_finish_request``."""
        origin: Origin | None = getattr(state, ORIGIN, None)
        if origin is not None and state.detokenizer is not None:
            tokens = array("i", state.detokenizer.output_token_ids).tobytes()
            memory_number = self._memory_of(origin.engine).number
            if tokens:
                self._history.age_if_new_version(self._model_version())
                # The engine has counted the tokens while it generated them.
                self._history.add(origin.prompt_key, tokens, memory_number)
            elif origin.carries_answers:
                # The request was aborted before it ran, so the engine did not receive the answers.
                self._history.send_again(origin.prompt_key, memory_number)
        self._vllm_finish_request(state)
