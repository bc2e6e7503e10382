"""Keeps the answers of all requests, and sends an engine those of a prompt that it has not counted.

See `darts_server.drafts.history`. Answers travel in the first request of a prompt to an engine.
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

from darts_server.drafts.history import History, key_of
from darts_server.vllm.engine_core.drafter import HISTORY

POLL_SECONDS = 5.0
"""Time between two questions to each engine whether it has emptied its counts. Each takes a millisecond of the engine.
Until then, the engine does not get again what it has forgotten."""
EMPTIED = "darts_emptied_drafts"
ORIGIN = "darts_origin"
"""Attribute of a request's state in vLLM."""


class Origin(NamedTuple):
    """Key of a request's prompt, name of its engine, and whether the request carries answers to the engine."""

    key: bytes
    engine: bytes
    carries_answers: bool


@dataclass(slots=True)
class Memory:
    """What an engine has counted since it started or emptied its counts.

    ``incarnation``: the engine's connection, if it may start again. ``emptied``: how often its counts were emptied.
    """

    number: int
    incarnation: object
    emptied: int = 0


class RequestHistory:
    """Changes vLLM's client and output processor so that ``history`` gets answers, and engines get history.

    ``version``: returns what changes with each update of weights and LoRA adapters.
    """

    def __init__(
        self,
        engine_core: Any,
        processor: OutputProcessor,
        history: History,
        version: Callable[[], object],
    ) -> None:
        self._core = engine_core
        self._states = processor.request_states
        self._history = history
        self._version = version
        self._memories: dict[bytes, Memory] = {}
        self._numbers = count(1)
        # The latest prompt with its adapter and key: candidates of a group are sent one after the other, and have the
        # same list of token ids.
        self._latest: tuple[Any, str | None, bytes] | None = None

        self._send = engine_core._send_input
        engine_core._send_input = self._send_with_history
        changed: Any = processor
        self._finish = processor._finish_request
        changed._finish_request = self._finish_and_keep

    async def watch_engines(self) -> None:
        """Find out which engines have emptied their counts, until cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            engines = list(self._core.core_engines)
            calls = [
                self._core._call_utility_async("collective_rpc", EMPTIED, None, (), None, engine=engine)
                for engine in engines
            ]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            for engine, answer in zip(engines, answers, strict=True):
                # The counts of a lost engine are gone anyway.
                if not isinstance(answer, BaseException):
                    self.note_emptied(engine, sum(answer))

    def note_emptied(self, engine: bytes, emptied: int) -> None:
        """Record how often an engine's workers have emptied their counts."""
        memory = self._memory_of(engine)
        if emptied != memory.emptied:
            self._memories[engine] = Memory(next(self._numbers), memory.incarnation, emptied)

    def _memory_of(self, engine: bytes) -> Memory:
        """Return what an engine has counted since it started."""
        # Engines of --replicas start again under the same name. vLLM's own engines do not.
        incarnation = getattr(self._core, "engines", {}).get(engine)
        memory = self._memories.get(engine)
        if memory is None or memory.incarnation is not incarnation:
            memory = self._memories[engine] = Memory(next(self._numbers), incarnation)
        return memory

    def _send_with_history(self, request_type: EngineCoreRequestType, request: Any, engine: bytes | None = None) -> Any:
        """Stand in for vLLM's method, which sends everything to engines."""
        if engine is None:
            engine = self._core.core_engine
        if request_type is EngineCoreRequestType.ADD:
            request = self._add_history(request, engine)
        return self._send(request_type, request, engine)

    def _add_history(self, request: EngineCoreRequest, engine: bytes) -> EngineCoreRequest:
        """Return a request with the answers of its prompt that the engine has not counted."""
        params = request.sampling_params
        state = self._states.get(request.request_id)
        # A prompt of embeddings has no tokens that others could share.
        is_text = request.prompt_embeds is None and not request.resumable
        if params is None or state is None or not state.prompt_token_ids or not is_text:
            return request

        # The state of a resumed request has its true prompt, without generated tokens.
        adapter = None if request.lora_request is None else request.lora_request.lora_name
        key = self._key_of(state.prompt_token_ids, adapter)
        self._history.age_if_new_version(self._version())
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
        latest = self._latest
        if latest is not None and latest[0] is token_ids and latest[1] == adapter:
            return latest[2]
        key = key_of(token_ids, adapter)
        self._latest = (token_ids, adapter, key)
        return key

    def _finish_and_keep(self, state: RequestState) -> None:
        """Keep the answer of a finished request in the history.

        Replaces vLLM's ``_finish_request``, and then calls it.
        """
        origin: Origin | None = getattr(state, ORIGIN, None)
        if origin is not None and state.detokenizer is not None:
            tokens = array("i", state.detokenizer.output_token_ids).tobytes()
            memory = self._memory_of(origin.engine).number
            if tokens:
                self._history.age_if_new_version(self._version())
                self._history.add(origin.key, tokens, memory)
            elif origin.carries_answers:
                # The request was aborted before it ran, so the engine did not receive the answers.
                self._history.send_again(origin.key, memory)
        self._finish(state)
