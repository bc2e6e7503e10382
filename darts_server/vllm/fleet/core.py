"""vLLM's client of engines on other hosts, which may join and be lost. Callers see each as a data-parallel rank.

vLLM's own client of several engines starts them, and ends when the first engine dies. This client has a connection to
the host of each engine (:mod:`darts_server.vllm.fleet.host`), which passes messages on unchanged.

When an engine is lost, its candidates are aborted, so that their groups start others. Its other requests resume on
another engine with the received tokens, because their callers may have these already.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import copy
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar

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
from darts_server.vllm.engine_core.holding import request_number
from darts_server.vllm.engine_core.probe_capture import INSTALL
from darts_server.vllm.fleet.transport import HIDDEN_STATES, Connection, Hello, Receiver
from darts_server.vllm.requests.held import numbered_request_of
from darts_server.vllm.requests.outputs import MAKE_COMPLETION
from darts_server.vllm.requests.prompt_request import adjust_for_prefix, find_prompt_end_parameter

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_MOVES = 3
"""How often a request may lose its engine. After that, the request may be the reason."""
RPC = "collective_rpc"
INIT_TRANSFER = "init_weight_transfer_engine"
TRANSFERS = ("start_weight_update", "update_weights")
# vLLM's backends for weight transfer that give each worker a rank after the trainer's.
NCCL_BACKENDS = ("nccl", "sparse_nccl")


class EngineLost(EngineError):
    """The engine of a call was lost before it answered."""


class FleetCore(AsyncMPClient):
    """Stands in for vLLM's client.

    ``config``: vLLM's configuration of every engine, with ``data_parallel_size`` set to the number of engines.
    """

    def __init__(self, config: VllmConfig) -> None:
        # vLLM's own constructor would start engines. These are the attributes that other methods of vLLM's class read.
        self.vllm_config = config
        self.resources: Any = SimpleNamespace(engine_dead=False, engine_manager=None)
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.client_index = 0
        self.client_count = 1
        self.engines_running = False
        self.engine_ranks_managed = list(range(config.parallel_config.data_parallel_size))
        self.core_engines: list[bytes] = []
        """Names of the engines that get requests and calls."""
        self._effective_attention_block_sizes = set[int | None]()
        self._kv_event_sources = dict[int, Any]()
        self.stats_update_address = None

        self.bring_to_state: Callable[[Engine], Awaitable[None]] | None = None
        """Gives an engine that has joined the state of the other engines, before it gets requests."""
        self.on_lost: Callable[[int], None] = lambda _: None
        self.on_hidden_states: Callable[[Sequence[bytes]], None] | None = None
        self.processor: OutputProcessor | None = None
        self.num_lost = 0
        self.engines: dict[bytes, Engine] = {}
        self.moves = Counter[str]()
        """How often each running request has lost its engine."""
        # Lost engines whose requests were not moved yet. Each is in the queue after its last outputs.
        self._lost_engines: list[Engine] = []
        # Engines that have joined vLLM's own transfer of weights.
        self._transfer_engines: list[Engine] | None = None
        self._seen_ranks: set[int] = set()
        self._call_ids = count()

    # --- engines join and are lost ----------------------------------------------

    def add_engine(self, hello: Hello, connection: Connection) -> Receiver:
        """Add an engine, which gets requests once it has the state of the other engines."""
        if hello.rank not in self.engine_ranks_managed:
            raise ValueError(f"an engine has rank {hello.rank}, but there are {len(self.engine_ranks_managed)} ranks")
        # Once for each rank, because vLLM adds up the KV blocks in these messages.
        if hello.rank not in self._seen_ranks:
            self._seen_ranks.add(hello.rank)
            self._apply_ready_response(hello.ready)

        engine = Engine(self, hello, connection)
        previous = self.engines.get(engine.name)
        if previous is not None:
            reason = "another engine of its rank has connected"
            self.lose(previous, reason, is_replaced=True)
            previous.connection.close(reason)
        self.engines[engine.name] = engine
        engine.joining_task = asyncio.get_running_loop().create_task(self._join(engine))
        return engine

    async def _join(self, engine: "Engine") -> None:
        try:
            if self.on_hidden_states is not None:
                for fault in await self.install_probe(engine):
                    if fault is not None:
                        logger.warning("engine %d reports no hidden states: %s", engine.rank, fault)
            if self.bring_to_state is not None:
                await self.bring_to_state(engine)
        except Exception as error:
            logger.exception("engine %d cannot be brought to the state of the others", engine.rank)
            engine.connection.close(f"it has not the state of the others: {error}")
            return
        # The engine may have been lost meanwhile.
        if self.engines.get(engine.name) is engine:
            self.core_engines = sorted([*self.core_engines, engine.name])
            logger.info(
                "engine %d is there; %d of %d", engine.rank, len(self.core_engines), len(self.engine_ranks_managed)
            )

    def lose(self, engine: "Engine", reason: str, *, is_replaced: bool = False) -> None:
        """Let other engines run the requests of a lost engine, and have it started again unless it is replaced."""
        # The engine was lost or replaced before.
        if self.engines.get(engine.name) is not engine:
            return
        del self.engines[engine.name]
        self.core_engines = [name for name in self.core_engines if name != engine.name]
        self.num_lost += 1
        logger.error("engine %d is lost with %d requests: %s", engine.rank, len(engine.requests), reason)
        for future in engine.unanswered_calls.values():
            if not future.done():
                future.set_exception(EngineLost(f"engine {engine.rank} was lost: {reason}"))
        engine.joining_task.cancel()
        self._lost_engines.append(engine)
        # `get_output_async` moves the requests once vLLM has read all outputs of the engine.
        self.outputs_queue.put_nowait(engine)
        if not is_replaced:
            self.on_lost(engine.rank)

    async def lose_silent_engines(self, max_seconds: float, should_send: Callable[[], bool]) -> None:
        """Treat engines as lost that have requests, but have sent nothing for ``max_seconds``.

        Runs until cancelled, or not at all for 0 seconds. ``should_send``: False while engines are paused.
        """
        interval = min(1.0, max_seconds / 4)
        while max_seconds:
            await asyncio.sleep(interval)
            for engine in list(self.engines.values()):
                # Polls are counted, because time in which this process did not run must not count.
                if engine.requests and should_send():
                    engine.silent_seconds += interval
                else:
                    engine.silent_seconds = 0.0
                if engine.silent_seconds > max_seconds:
                    reason = f"it has requests, and sent nothing for {max_seconds:g} s (--engine-watchdog)"
                    engine.connection_lost(reason)
                    engine.connection.close("it hangs")

    @property
    def core_engine(self) -> bytes:  # type: ignore[override]
        """Name of any engine that is up, for vLLM's calls of a single engine."""
        if not self.core_engines:
            raise EngineBusy("no engine is up; they are started again", RETRY_SECONDS)
        return self.core_engines[0]

    # --- methods that replace vLLM's ---------------------------------------------

    def _ensure_output_queue_task(self) -> None:
        """Do nothing: connections deliver outputs."""

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            item: EngineCoreOutputs | Engine = await self.outputs_queue.get()
            if not isinstance(item, Engine):
                return item
            await self._move_requests(item)
            self._lost_engines.remove(item)

    async def _move_requests(self, lost: "Engine") -> None:
        ended_ids = []
        for request_id, request in lost.requests.items():
            # Requests that vLLM has forgotten need no end.
            state = None if self.processor is None else self.processor.request_states.get(request_id)
            if state is None:
                self.moves.pop(request_id, None)
                continue
            continuation = None
            if request_id not in lost.aborted_ids:
                continuation = resume_request(request, state)
            if continuation is None:
                ended_ids.append(request_id)
                continue
            self.moves[request_id] += 1
            try:
                if self.moves[request_id] > MAX_MOVES:
                    raise EngineBusy(f"the request has lost its engine {self.moves[request_id]} times", RETRY_SECONDS)
                await self.add_request_async(continuation)
            except EngineBusy as error:
                # vLLM raises an error in this queue to the caller.
                if state.queue is not None:
                    state.queue.put(error)
                ended_ids.append(request_id)
        for request_id in ended_ids:
            self.moves.pop(request_id, None)
        # Empty statistics tell vLLM's metrics that the engine runs nothing.
        self.outputs_queue.put_nowait(
            EngineCoreOutputs(
                engine_index=lost.rank,
                outputs=aborted_outputs(ended_ids),
                scheduler_stats=SchedulerStats(),
            )
        )

    def _find_engine(self, name: bytes) -> "Engine":
        engine = self.engines.get(name)
        if engine is None:
            raise EngineLost(f"engine {int.from_bytes(name, 'little')} was lost")
        return engine

    async def _send_input_message(self, message: Sequence[Any], engine: bytes, *_: Any) -> None:
        self._find_engine(engine).connection.send(message)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Send a request to its rank if that is up, or to the engine with the fewest requests."""
        rank = request.data_parallel_rank
        name = None if rank is None else rank.to_bytes(2, "little")
        if name not in self.core_engines:
            # If no engine is up, `core_engine` raises `EngineBusy`.
            name = min(
                self.core_engines,
                key=lambda candidate: len(self.engines[candidate].requests),
                default=self.core_engine,
            )
        request.client_index = self.client_index
        # Each engine is the only rank that its own vLLM has.
        request.data_parallel_rank = None
        self.engines[name].requests[request.request_id] = request
        await self._send_input(EngineCoreRequestType.ADD, request, name)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        missing_ids = dict.fromkeys(request_ids)
        for name, engine in list(self.engines.items()):
            found_ids = [request_id for request_id in missing_ids if request_id in engine.requests]
            for request_id in found_ids:
                del missing_ids[request_id]
                # Engines answer aborts of numbered requests.
                if request_number(engine.requests[request_id].sampling_params):
                    engine.aborted_ids.add(request_id)
                else:
                    engine.forget(request_id)
            if found_ids:
                await self._send_input(EngineCoreRequestType.ABORT, found_ids, name)
        # Requests of lost engines must not move to other engines.
        for lost in self._lost_engines:
            lost.aborted_ids.update(missing_ids)
        # The missing requests are of a lost engine, or have ended. vLLM ignores outputs of requests that have ended.
        if missing_ids:
            self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=aborted_outputs(missing_ids)))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call all engines. Engines that are lost meanwhile do not count.

        Return the answers of all workers to ``collective_rpc``. For other methods, return whether all flags are true,
        or the first engine's answer.

        Raises:
            EngineError: vLLM's own weight transfer would not reach all engines that have joined it.
        """
        if method == RPC:
            engines = [self.engines[name] for name in self.core_engines]
            if args[0] == INIT_TRANSFER:
                self._transfer_engines = engines
            elif args[0] in TRANSFERS and self._transfer_engines not in (None, engines):
                raise EngineError("an engine that had joined the transfer of weights was lost: restart the server")
        answers = await gather_answers(
            self._call_utility_async(method, *args, engine=name) for name in self.core_engines
        )
        if method == RPC:
            return [worker_answer for answer in answers for worker_answer in answer]
        if len(answers) > 1 and all(isinstance(answer, bool) for answer in answers):
            return all(answers)
        return answers[0] if answers else None

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        called_engine = self._find_engine(engine)
        if method == RPC:
            args = rpc_arguments(self.vllm_config, called_engine.rank, *args)
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        called_engine.unanswered_calls[call_id] = future
        try:
            await self._send_input(EngineCoreRequestType.UTILITY, (self.client_index, call_id, method, args), engine)
            # `Engine.message_received` or `lose` completes the future.
            return await future
        finally:
            called_engine.unanswered_calls.pop(call_id, None)

    async def install_probes(self, receive: Callable[[Sequence[bytes]], None]) -> list[str | None]:
        """Install the probe in all engines, and in engines that join later. Return their workers' answers.

        ``receive``: called with each message of a probe.
        """
        self.on_hidden_states = receive
        # A lost engine gets the probe when it has started again.
        answers = await gather_answers(self.install_probe(self.engines[name]) for name in self.core_engines)
        return [worker_answer for answer in answers for worker_answer in answer]

    async def install_probe(self, engine: "Engine") -> list[str | None]:
        # The arguments of ``collective_rpc``: method, timeout, args and kwargs.
        call = (RPC, INSTALL, None, (engine.hidden_states_address,), None)
        worker_answers: list[str | None] = await self._call_utility_async(*call, engine=engine.name)
        return worker_answers

    def shutdown(self, timeout: float | None = None) -> None:
        for engine in list(self.engines.values()):
            engine.connection.close("the coordinator stops")
            engine.joining_task.cancel()


async def gather_answers(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the answers of the engines that were not lost meanwhile, or raise the first other error."""
    answers = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, EngineLost):
            continue
        if isinstance(answer, BaseException):
            raise answer
        answers.append(answer)
    return answers


def rpc_arguments(
    config: VllmConfig,
    rank: int,
    method: str,
    timeout: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, ...]:
    """Return the arguments of ``collective_rpc`` for the engine ``rank``, whose workers count from 0."""
    engine_workers = config.parallel_config.world_size
    first_worker = rank * engine_workers
    transfer_config: Any = config.weight_transfer_config
    changed_kwargs = dict(kwargs or {})
    if method == INIT_TRANSFER and transfer_config is not None and transfer_config.backend in NCCL_BACKENDS:
        info = changed_kwargs["init_info"]
        changed_kwargs["init_info"] = {**info, "rank_offset": info.get("rank_offset", 0) + first_worker}
    elif method == "update_weights" and isinstance(changed_kwargs.get("update_info"), list):
        # The list has an entry for each worker of all engines.
        end = first_worker + engine_workers
        changed_kwargs["update_info"] = changed_kwargs["update_info"][first_worker:end]
    return method, timeout, args, changed_kwargs or kwargs


def resume_request(request: EngineCoreRequest, state: RequestState) -> EngineCoreRequest | None:
    """Return a request that continues a lost request, or that restarts it and empties ``state``, or None."""
    numbered = numbered_request_of(state)
    # The group of a candidate may have counted more tokens than were received.
    if request.resumable or (numbered is not None and numbered.is_candidate):
        return None
    params = request.sampling_params
    continuation = copy(request)
    prompt = request.prompt_token_ids or []
    received_tokens: Sequence[int] = ()
    if state.detokenizer is not None:
        # If the request was moved before, its prompt has some of the tokens already.
        received_tokens = state.detokenizer.output_token_ids[len(prompt) - state.prompt_len :]
    if params is None or not received_tokens:
        return continuation

    is_token_prompt = request.prompt_token_ids is not None and request.prompt_embeds is None
    # Routed experts and sampling masks of two prompts cannot be joined.
    has_chunks = state.routed_experts_chunks or state.sampling_mask_chunks
    # Penalties, for example, treat the tokens of the prompt differently.
    needs_prompt_end = find_prompt_end_parameter(params) is not None
    if is_token_prompt and not needs_prompt_end and not has_chunks:
        continuation.prompt_token_ids = [*prompt, *received_tokens]
        continuation.sampling_params = copy(params)
        adjust_for_prefix(continuation.sampling_params, len(received_tokens))
        return continuation

    # A caller of a stream has some tokens already, so its request cannot restart.
    if params.output_kind != RequestOutputKind.FINAL_ONLY:
        return None
    tokenizer = None if state.logprobs_processor is None else state.logprobs_processor.tokenizer
    # `DeferredOutput` may have given the state a method that adds the tokens that were received.
    vars(state).pop(MAKE_COMPLETION, None)
    state.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    state.logprobs_processor = LogprobsProcessor.from_new_request(tokenizer, request)
    state.routed_experts_chunks = []
    state.sampling_mask_chunks = []
    return continuation


def aborted_outputs(request_ids: Iterable[str]) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT) for request_id in request_ids]


class Engine:
    """An engine of the fleet."""

    def __init__(self, core: FleetCore, hello: Hello, connection: Connection) -> None:
        self.rank = hello.rank
        self.name = hello.rank.to_bytes(2, "little")
        self.hidden_states_address = hello.hidden_states
        self.connection = connection
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted_ids: set[str] = set()
        """Ids of the requests that were aborted, and did not end yet."""
        self.unanswered_calls: dict[int, Any] = {}
        """Futures of calls, by their ids."""
        self.joining_task: asyncio.Task[None]
        self.silent_seconds = 0.0
        self._core = core

    def message_received(self, parts: list[bytes]) -> None:
        self.silent_seconds = 0.0
        if parts[0] == HIDDEN_STATES:
            if self._core.on_hidden_states is not None:
                self._core.on_hidden_states(parts[1:])
            return
        if parts[0] == EngineCoreProc.ENGINE_CORE_DEAD:
            self.connection.close("it has died")
            return
        outputs: EngineCoreOutputs = self._core.decoder.decode(parts)
        outputs.engine_index = self.rank
        answer = outputs.utility_output
        if answer is not None:
            # The caller may have been cancelled.
            if answer.call_id in self.unanswered_calls:
                _process_utility_output(answer, self.unanswered_calls)
            return
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.forget(output.request_id)
        if outputs.outputs or outputs.scheduler_stats:
            self._core.outputs_queue.put_nowait(outputs)

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.aborted_ids.discard(request_id)
        self._core.moves.pop(request_id, None)

    def connection_lost(self, reason: str) -> None:
        self._core.lose(self, reason)
