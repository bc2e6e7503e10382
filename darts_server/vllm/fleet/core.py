"""vLLM's client of engines that are elsewhere, and come and go: each is a data-parallel rank to everything above it.

vLLM's own client of several engines starts them, or shares sockets with them, and ends with the first that dies. This
one has a connection to the host of each (:mod:`darts_server.vllm.fleet.host`), which hands messages on as they are.

An engine that is lost takes with it what it has not sent. Of a candidate that is an abort, so that its group starts
another. Any other request goes on elsewhere with the tokens that were received, which its caller may have already.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, _process_utility_output
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from darts_server.exceptions import RETRY_SECONDS, EngineBusy, EngineError
from darts_server.vllm.engine_core.holding import number_of
from darts_server.vllm.engine_core.probe_capture import INSTALL
from darts_server.vllm.fleet.transport import HIDDEN_STATES, Connection, Hello, Receiver
from darts_server.vllm.requests.held import numbered_of
from darts_server.vllm.requests.prompt_request import depends_on_prompt_end, leave_rest

logger = logging.getLogger(__name__)

MAX_MOVES = 3  # how often a request may lose its engine
INIT_TRANSFER, TRANSFERS = "init_weight_transfer_engine", ("start_weight_update", "update_weights")
NCCL_BACKENDS = ("nccl", "sparse_nccl")
"""Of vLLM's ways to transfer weights, those in which each worker has a rank after that of the trainer."""


class EngineLost(EngineError):
    """The engine of a call was lost before it answered."""


class Lost(NamedTuple):
    """Requests of an engine that is lost; in the queue of its outputs, after the last of them."""

    rank: int
    requests: dict[str, EngineCoreRequest]
    aborted: set[str]


class FleetCore(AsyncMPClient):
    """Stands in the place of vLLM's client.

    Args:
        config: of every engine; vLLM's, with ``data_parallel_size`` the number of engines.
    """

    def __init__(self, config: VllmConfig) -> None:
        # Not vLLM's own: that starts engines.
        self.vllm_config = config
        self.resources: Any = SimpleNamespace(engine_dead=False, engine_manager=None)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.client_index, self.client_count, self.engines_running = 0, 1, False
        self.engine_ranks_managed = list(range(config.parallel_config.data_parallel_size))
        self.core_engines: list[bytes] = []  # those that get requests and calls
        self._effective_attention_block_sizes, self._kv_event_sources = set[int | None](), dict[int, Any]()
        self.stats_update_address = None
        self.bring_to_state: Callable[[Engine], Awaitable[None]] | None = None
        """Brings an engine that has come to the state of the others, before it gets requests."""
        self.on_lost: Callable[[int], None] = lambda _: None  # called with the rank of each engine that is lost
        self.on_hidden_states: Callable[[Sequence[bytes]], None] | None = None  # called with each message of a probe
        self.processor: OutputProcessor | None = None  # vLLM's, of the outputs of all requests
        self.lost = 0  # engines, so far
        self.engines: dict[bytes, Engine] = {}  # all that are connected
        self.moves = Counter[str]()  # how often requests have lost their engine
        self._lost: list[Lost] = []  # in the queue
        self._transfer: list[Engine] | None = None
        self._seen: set[int] = set()
        self._calls = count()

    # --- engines come and go ----------------------------------------------------

    def joined(self, hello: Hello, connection: Connection) -> Receiver:
        """Take an engine that has connected. It gets requests once it has what the others have."""
        if hello.rank not in self.engine_ranks_managed:
            raise ValueError(f"rank {hello.rank} of an engine, of {len(self.engine_ranks_managed)}")
        if hello.rank not in self._seen:  # vLLM adds its KV blocks to those of the others
            self._seen.add(hello.rank)
            self._apply_ready_response(hello.ready)
        engine = Engine(self, hello, connection)
        if (before := self.engines.get(engine.name)) is not None:
            self.lose(before, reason := "another one has come in its place", is_replaced=True)
            before.connection.close(reason)
        self.engines[engine.name] = engine
        engine.joining = asyncio.get_running_loop().create_task(self._join(engine))
        return engine

    async def _join(self, engine: "Engine") -> None:
        try:
            if self.on_hidden_states is not None:
                await self.install_probe(engine)
            if self.bring_to_state is not None:
                await self.bring_to_state(engine)
        except Exception as error:
            logger.exception("engine %d cannot be brought to the state of the others", engine.rank)
            engine.connection.close(f"it has not the state of the others: {error}")
            return
        if self.engines.get(engine.name) is engine:
            self.core_engines = sorted([*self.core_engines, engine.name])
            up, count = len(self.core_engines), len(self.engine_ranks_managed)
            logger.info("engine %d is there; %d of %d", engine.rank, up, count)

    def lose(self, engine: "Engine", reason: str, *, is_replaced: bool = False) -> None:
        """Let others do what an engine was doing, and let another be started unless it is there already."""
        if self.engines.get(engine.name) is not engine:
            return
        del self.engines[engine.name]
        self.core_engines = [name for name in self.core_engines if name != engine.name]
        self.lost += 1
        logger.error("engine %d is lost with %d requests: %s", engine.rank, len(engine.requests), reason)
        for future in engine.calls.values():
            if not future.done():
                future.set_exception(EngineLost(f"engine {engine.rank} was lost: {reason}"))
        engine.joining.cancel()
        self._lost.append(Lost(engine.rank, engine.requests, engine.aborted))
        self.outputs_queue.put_nowait(self._lost[-1])
        if not is_replaced:
            self.on_lost(engine.rank)

    async def lose_silent(self, seconds: float, should_send: Callable[[], bool]) -> None:
        """Give up engines that have requests and have sent nothing for so long: they hang. Runs until cancelled.

        0 seconds: none is given up.

        Polls are counted rather than read from a clock: time in which this process did not run does not count.
        """
        interval = min(1.0, seconds / 4)
        while seconds:
            await asyncio.sleep(interval)
            for engine in list(self.engines.values()):
                engine.silent = engine.silent + interval if engine.requests and should_send() else 0.0
                if engine.silent > seconds:
                    engine.lost(f"it has requests, and sent nothing for {seconds:g} s (--engine-watchdog)")
                    engine.connection.close("it hangs")

    @property
    def core_engine(self) -> bytes:  # type: ignore[override]
        """Any of them, for vLLM's calls of one."""
        if not self.core_engines:
            raise EngineBusy("no engine is up; they are started again", RETRY_SECONDS)
        return self.core_engines[0]

    # --- in place of vLLM's ------------------------------------------------------

    def _ensure_output_queue_task(self) -> None:
        """Outputs come by the connections."""

    async def get_output_async(self) -> EngineCoreOutputs:
        while isinstance(outputs := await self.outputs_queue.get(), Lost):
            await self._move(outputs)
            self._lost.remove(outputs)
        result: EngineCoreOutputs = outputs
        return result

    async def _move(self, lost: Lost) -> None:
        """Let requests whose engine is lost go on elsewhere, or end."""
        ended = []
        for name, request in lost.requests.items():
            state = None if self.processor is None else self.processor.request_states.get(name)
            if state is None:
                self.moves.pop(name, None)
                continue
            follower = None if name in lost.aborted else following(request, state)
            if follower is None:
                ended.append(name)
                continue
            self.moves[name] += 1
            try:
                if self.moves[name] > MAX_MOVES:  # it may be the reason
                    raise EngineBusy(f"the request has lost its engine {self.moves[name]} times", RETRY_SECONDS)
                await self.add_request_async(follower)
            except EngineBusy as error:
                if state.queue is not None:
                    state.queue.put(error)
                ended.append(name)
        for name in ended:
            self.moves.pop(name, None)
        # For vLLM's metrics: it runs nothing now.
        ends = EngineCoreOutputs(engine_index=lost.rank, outputs=aborted(ended), scheduler_stats=SchedulerStats())
        self.outputs_queue.put_nowait(ends)

    def _engine(self, name: bytes) -> "Engine":
        if (engine := self.engines.get(name)) is None:
            raise EngineLost(f"engine {int.from_bytes(name, 'little')} was lost")
        return engine

    async def _send_input_message(self, message: Sequence[Any], engine: bytes, *_: Any) -> None:
        self._engine(engine).connection.send(message)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        wanted = request.data_parallel_rank
        name = None if wanted is None else wanted.to_bytes(2, "little")
        if name not in self.core_engines:
            name = min(self.core_engines, key=lambda each: len(self.engines[each].requests), default=self.core_engine)
        request.client_index, request.data_parallel_rank = self.client_index, None
        self.engines[name].requests[request.request_id] = request
        await self._send_input(EngineCoreRequestType.ADD, request, name)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        left = dict.fromkeys(request_ids)
        for name, engine in list(self.engines.items()):
            if here := [each for each in left if each in engine.requests]:
                for each in here:
                    del left[each]
                    if number_of(engine.requests[each].sampling_params):
                        engine.aborted.add(each)  # it is answered
                    else:
                        engine.forget(each)
                await self._send_input(EngineCoreRequestType.ABORT, here, name)
        for lost in self._lost:
            lost.aborted.update(left)
        if left:  # those of an engine that is lost; the others have ended, and this is ignored
            self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=aborted(left)))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call all engines; return the result of one, where they differ what says most, and of workers all of them.

        What is lost meanwhile does not count, and what comes gets the state of the others.

        Raises:
            EngineError: vLLM's own transfer of weights would not reach all engines that have joined it.
        """
        if method == "collective_rpc":
            engines = [self.engines[name] for name in self.core_engines]
            if args[0] == INIT_TRANSFER:
                self._transfer = engines
            elif args[0] in TRANSFERS and self._transfer not in (None, engines):
                raise EngineError("an engine that had joined the transfer of weights was lost: restart the server")
        calls = (self._call_utility_async(method, *args, engine=engine) for engine in self.core_engines)
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        answers = [each for each in results if not isinstance(each, EngineLost)]
        for each in answers:
            if isinstance(each, BaseException):
                raise each
        if method == "collective_rpc":
            return [each for answer in answers for each in answer]
        if len(answers) > 1 and all(isinstance(each, bool) for each in answers):
            return all(answers)
        return answers[0] if answers else None

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        if method == "collective_rpc":
            args = for_engine(self.vllm_config, int.from_bytes(engine, "little"), *args)
        there, call = self._engine(engine), next(self._calls)
        future = there.calls[call] = asyncio.get_running_loop().create_future()
        try:
            await self._send_input(EngineCoreRequestType.UTILITY, (self.client_index, call, method, args), engine)
            return await future
        finally:
            there.calls.pop(call, None)

    async def install_probes(self, receive: Callable[[Sequence[bytes]], None]) -> list[str | None]:
        """Install the probe in all engines, also in those that come later. Returns the answers of their workers.

        ``receive``: called with each message of a probe.
        """
        self.on_hidden_states = receive
        installed = [self.install_probe(self.engines[name]) for name in self.core_engines]
        results = await asyncio.gather(*installed, return_exceptions=True)
        return [answer for each in results if not isinstance(each, BaseException) for answer in each]

    async def install_probe(self, engine: "Engine") -> list[str | None]:
        call = ("collective_rpc", INSTALL, None, (engine.hidden_states,), None)
        answers: list[str | None] = await self._call_utility_async(*call, engine=engine.name)
        return answers

    def shutdown(self, timeout: float | None = None) -> None:
        for engine in list(self.engines.values()):
            engine.connection.close("the coordinator stops")
            engine.joining.cancel()


def for_engine(config: VllmConfig, rank: int, method: str, timeout: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the arguments of ``collective_rpc`` for one engine: each takes itself for the only one."""
    workers = config.parallel_config.world_size
    transfer: Any = config.weight_transfer_config
    infos = dict(kwargs or {})
    if method == INIT_TRANSFER and transfer is not None and transfer.backend in NCCL_BACKENDS:
        info = infos["init_info"]
        infos["init_info"] = {**info, "rank_offset": info.get("rank_offset", 0) + rank * workers}
    elif method == "update_weights" and isinstance(infos.get("update_info"), list):  # one for each worker of all
        infos["update_info"] = infos["update_info"][rank * workers : (rank + 1) * workers]
    return method, timeout, args, infos or kwargs


def following(request: EngineCoreRequest, state: RequestState) -> EngineCoreRequest | None:
    """Return a request that goes on from what was received of another, or restarts it; ``None`` if neither can be.

    Its outputs are added to ``state``. A candidate does not go on: its group may have counted more tokens than it has.
    """
    params, follower = request.sampling_params, copy(request)
    held = numbered_of(state)
    if (held is not None and held.is_candidate) or request.resumable:
        return None
    prompt = request.prompt_token_ids or []
    # If it was moved before, its prompt has some of them already.
    tokens = [] if state.detokenizer is None else state.detokenizer.output_token_ids[len(prompt) - state.prompt_len :]
    if params is None or not tokens:
        return follower
    extends_prompt = request.prompt_token_ids is not None and request.prompt_embeds is None
    # Experts and sampling masks cannot be joined where a request goes on with another prompt.
    has_more = state.routed_experts_chunks or state.sampling_mask_chunks
    if extends_prompt and depends_on_prompt_end(params) is None and not has_more:
        follower.prompt_token_ids = [*prompt, *tokens]
        follower.sampling_params = copy(params)
        leave_rest(follower.sampling_params, len(tokens))
        return follower
    if params.output_kind != RequestOutputKind.FINAL_ONLY:
        return None
    tokenizer = None if state.logprobs_processor is None else state.logprobs_processor.tokenizer
    state.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    state.logprobs_processor = LogprobsProcessor.from_new_request(tokenizer, request)
    state.routed_experts_chunks, state.sampling_mask_chunks = [], []
    return follower


def aborted(requests: Iterable[str]) -> list[EngineCoreOutput]:
    """Return what an engine sends of requests that it has aborted."""
    return [EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT) for name in requests]


class Engine:
    """One engine, in one of its lives. ``requests``: that it has. ``aborted``: those of them that are to end."""

    def __init__(self, core: FleetCore, hello: Hello, connection: Connection) -> None:
        self.rank, self.name = hello.rank, hello.rank.to_bytes(2, "little")
        self.hidden_states = hello.hidden_states  # where its workers send hidden states
        self.connection = connection
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: set[str] = set()
        self.calls: dict[int, Any] = {}  # futures of calls that it has not answered
        self.joining: asyncio.Task[None]
        self.silent = 0.0  # seconds since its last message
        self._core = core

    def received(self, parts: list[bytes]) -> None:
        self.silent = 0.0
        if parts[0] == HIDDEN_STATES:
            if self._core.on_hidden_states is not None:
                self._core.on_hidden_states(parts[1:])
            return
        if parts[0] == EngineCoreProc.ENGINE_CORE_DEAD:
            self.connection.close("it has died")
            return
        outputs: EngineCoreOutputs = self._core.decoder.decode(parts)
        outputs.engine_index = self.rank
        if outputs.utility_output is not None:
            if outputs.utility_output.call_id in self.calls:
                _process_utility_output(outputs.utility_output, self.calls)
            return
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.forget(output.request_id)
        if outputs.outputs or outputs.scheduler_stats:
            self._core.outputs_queue.put_nowait(outputs)

    def forget(self, request: str) -> None:
        """Note that a request has ended."""
        self.requests.pop(request, None)
        self.aborted.discard(request)
        self._core.moves.pop(request, None)

    def lost(self, reason: str) -> None:
        self._core.lose(self, reason)
