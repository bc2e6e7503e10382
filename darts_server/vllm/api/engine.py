"""vLLM behind the engine port. Each candidate is a vLLM request with final-only output.

This relies on undocumented details of vLLM, which tests on the real engine cover:

* The ``request_id`` of the collector that ``add_request`` returns is vLLM's internal id.
* ``output_processor.request_states[id].detokenizer.num_output_tokens()`` is the number of tokens received so far.
* ``detokenizer.output_token_ids`` is append-only, and a prefix of the final output, even if a stop string is found.
* While a final-only request runs, vLLM reads neither its detokenizer's text nor its log-probs, see
  :mod:`darts_server.vllm.requests.outputs`.
* An aborted final-only request still yields its output.
* ``abort(..., internal=True)`` takes internal ids.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from darts_server.engine.port import NO_TOKENS, CandidateResult, Engine, Probe, TokenSlice
from darts_server.exceptions import (
    RETRY_SECONDS,
    CandidateFailed,
    EngineBusy,
    EngineDead,
    EngineError,
    EngineRefused,
    InvalidRequest,
    Overloaded,
)
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.voting import VoteRunner
from darts_server.types import FinishReason
from darts_server.vllm.api.controlled import ControlledLLM
from darts_server.vllm.api.probe_receiver import ProbeReceiver
from darts_server.vllm.flags import DRAFTER
from darts_server.vllm.fleet.ranks import BY_PRIORITY, add_placement
from darts_server.vllm.requests.adding import change_before_send
from darts_server.vllm.requests.held import HeldRequests, OncePerTurn
from darts_server.vllm.requests.outputs import DeferredOutput, sampled_logprobs, truncate_output
from darts_server.vllm.requests.prompt_request import PromptRequest, check_resumable
from darts_server.vllm.requests.sampling import REFUSALS

logger = logging.getLogger(__name__)

# vLLM's finish reasons of candidates that were not aborted. "repetition" is a limit of the caller's, like "length".
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.LENGTH}

# vLLM checks only a part of a grammar before it sends the request to the engine.
UNUSABLE_GRAMMAR = (
    "the engine cannot compile the schema or grammar, or no token can begin it (the engine's log says which); correct "
    "or simplify it"
)

# For app.py, which may not import vLLM.
VllmPort: TypeAlias = Engine[PromptRequest, RequestOutput]
VllmRollouts: TypeAlias = Rollouts[PromptRequest, RequestOutput]
VllmBatches: TypeAlias = BatchRegistry[PromptRequest, RequestOutput]
VllmVoteRunner: TypeAlias = VoteRunner[PromptRequest, RequestOutput]


@dataclass(slots=True, eq=False)
class VllmCandidate:
    """Implements :class:`darts_server.engine.port.RunningCandidate`."""

    held_requests: HeldRequests
    collector: RequestOutputCollector
    aborts: OncePerTurn[RequestOutputCollector]
    on_end: Callable[[], None]
    deferred: DeferredOutput
    has_grammar: bool
    is_released: bool = False

    def count_tokens(self) -> int | None:
        return self.held_requests.count_tokens(self.collector.request_id)

    def tokens_from(self, start: int) -> TokenSlice | None:
        state = self.held_requests.states.get(self.collector.request_id)
        # The final output has arrived.
        if state is None or state.detokenizer is None:
            return None
        # Held tokens would arrive with the final output.
        if not self.is_released:
            self.is_released = True
            self.held_requests.release(self.collector.request_id)
        tokens = state.detokenizer.output_token_ids[start:]
        logprobs = self.deferred.token_logprobs
        if logprobs is not None:
            logprobs = logprobs[start:]
        return TokenSlice(tokens, logprobs, self.deferred.returns_logprobs)

    def stop(self) -> int:
        self.aborts.add(self.collector)
        tokens = self.count_tokens()
        if tokens is not None:
            return tokens
        # The candidate has finished, but `result` has not taken its output from the collector yet.
        output = self.collector.output
        return len(output.outputs[0].token_ids) if isinstance(output, RequestOutput) else 0

    async def result(self) -> CandidateResult[RequestOutput]:
        try:
            output = await self.collector.get()
        except Exception as error:
            raise translate_error(error) from error
        finally:
            self.on_end()

        assert isinstance(output, RequestOutput)
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            # With no token the grammar was not compiled. With one token the grammar allows no first token.
            if self.has_grammar and len(completion.token_ids) <= 1:
                refusal = InvalidRequest("structured_outputs", UNUSABLE_GRAMMAR)
                raise translate_error(refusal) from refusal
            raise CandidateFailed(f"vLLM failed on request {self.collector.request_id} while generating")
        if self.deferred.token_logprobs is not None and np.isnan(self.deferred.token_logprobs).any():
            raise CandidateFailed(
                f"log-probs of request {self.collector.request_id} are NaN: the model's weights are broken, "
                "or it overflows at this precision"
            )

        # None if the candidate was aborted.
        reason = FINISH_REASONS.get(completion.finish_reason or "")
        if reason is not None:
            completion.finish_reason = reason.value
        return CandidateResult(len(completion.token_ids), reason, output)


class VllmEngine:
    """Implements :class:`darts_server.engine.port.Engine`."""

    def __init__(self, llm: ControlledLLM, probes: ProbeReceiver) -> None:
        self._llm = llm
        self._probes = probes
        # A completed group stops all of its running candidates in one turn of the event loop: one message for all.
        self._aborts = OncePerTurn(self._abort)
        self._tokenizer = llm.held_requests.tokenizer
        config = llm.vllm_config
        self.num_engines: int = config.parallel_config.data_parallel_size
        self.capacity: int = config.scheduler_config.max_num_seqs * self.num_engines
        self.has_priorities: bool = config.scheduler_config.policy == BY_PRIORITY
        speculative = config.speculative_config
        self.drafts_from_siblings = speculative is not None and speculative.model == DRAFTER

    @property
    def weight_version(self) -> int:
        return self._llm.weight_version

    @property
    def unfinished_requests(self) -> int:
        return len(self._llm.output_processor.request_states)

    @property
    def probe_width(self) -> int | None:
        return self._probes.width

    async def start(
        self,
        request: PromptRequest,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> VllmCandidate:
        # The clean-up runs when the candidate has finished, or at once if it cannot start.
        with ExitStack() as cleanup:
            params = request.make_params(index)
            returns_logprobs = True
            if probe is not None:
                # Without a number the engine sends no hidden states.
                probe_number = None
                if probe.detect_at and self.probe_width is not None:
                    probe_number = self._probes.register(probe)
                    cleanup.callback(self._probes.unregister, probe_number)
                params = request.make_probed_params(index, probe, probe_number)
                returns_logprobs = not request.adds_logprobs(probe)

            # The output is made as if the candidate had not been stopped, so from the parameters of the whole answer.
            deferred = DeferredOutput(
                self._tokenizer,
                params,
                prefix,
                returns_logprobs=returns_logprobs,
            )
            prompt = request.prompt
            if prefix.token_ids:
                prompt, params = request.make_resumed(index, prefix.token_ids)

            # Groups that were admitted before the engine died must not start on it.
            self._llm.gate.raise_failure()
            rank = cleanup.enter_context(self._llm.ranks.count_candidate(request.request_id))
            options = add_placement(self._llm.vllm_config, request.options, rank, order)
            # The form of ids that vLLM gives to the children of a request with n > 1.
            request_id = f"{index}_{request.request_id}"
            # Candidates with a probe or a prefix have other parameters or another prompt.
            shared_request = request if probe is None and not prefix.token_ids else None
            try:
                with change_before_send(deferred.start_collecting, shared_request):
                    collector = await self._llm.add_request(request_id, prompt, params, **options)
            except Exception as error:
                raise translate_error(error) from error

            return VllmCandidate(
                self._llm.held_requests,
                collector,
                self._aborts,
                on_end=cleanup.pop_all().close,
                deferred=deferred,
                has_grammar=params.structured_outputs is not None,
            )

    def check_resumable(self, request: PromptRequest) -> None:
        check_resumable(request.params)

    async def _abort(self, collectors: list[RequestOutputCollector]) -> None:
        """Abort requests. If that fails, `VllmCandidate.result` raises the error."""
        try:
            # The engine answers an abort with the output that it has generated so far.
            await self._llm.engine_core.abort_requests_async([collector.request_id for collector in collectors])
        except Exception as error:
            logger.exception("vLLM failed to abort %d requests", len(collectors))
            for collector in collectors:
                # Requests that have finished keep their output.
                if collector.output is None:
                    collector.put(CandidateFailed(f"vLLM failed to abort request {collector.request_id}: {error}"))

    def truncate(self, request: PromptRequest, output: RequestOutput, tokens: int) -> RequestOutput:
        return truncate_output(output, tokens)

    def aborted_output(self, request: PromptRequest, prefix: TokenSlice = NO_TOKENS) -> RequestOutput:
        return DeferredOutput(self._tokenizer, request.params, prefix).make_output(request.prompt)

    def finished_output(
        self,
        request: PromptRequest,
        tokens: TokenSlice,
        finish_reason: FinishReason,
        text: str,
    ) -> RequestOutput:
        deferred = DeferredOutput(self._tokenizer, request.params, tokens)
        return deferred.make_output(request.prompt, finish_reason.value, text)

    def tokens_from(self, output: RequestOutput, start: int) -> TokenSlice:
        completion = output.outputs[0]
        logprobs = sampled_logprobs(completion)
        if logprobs is not None:
            logprobs = logprobs[start:]
        return TokenSlice(list(completion.token_ids[start:]), logprobs)

    def token_ids(self, request: PromptRequest, output: RequestOutput) -> tuple[Sequence[int], Sequence[int]]:
        return output.prompt_token_ids or (), output.outputs[0].token_ids


def translate_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    if isinstance(error, EngineDeadError):
        return EngineDead(str(error))
    # Raised at the limits --max-num-queued-reqs and --max-num-queued-tokens.
    if isinstance(error, (GracefulHTTPError, Overloaded)):
        return EngineBusy(str(error), RETRY_SECONDS)
    if isinstance(error, REFUSALS):
        return EngineRefused(str(error))
    return CandidateFailed(f"{type(error).__name__}: {error}")
