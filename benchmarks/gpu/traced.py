"""An engine port with lengths from a trace: every candidate really decodes as many tokens as the trace says.

Random weights produce no meaningful end of sequence. So that is ignored, each candidate's ``max_tokens`` is its length
in the trace, and its finish reason is replaced by that of the trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.outputs import RequestOutput

from darts_server.engine.port import NOTHING, CandidateResult, Probe, RunningCandidate, TokenSlice
from darts_server.types import FinishReason
from darts_server.vllm.engine import VllmPort
from darts_server.vllm.prompt_request import PromptRequest

Lengths = Callable[[PromptRequest, int, bool], tuple[int, FinishReason]]
"""Request, candidate index and whether it goes on from an earlier batch -> length in tokens and finish reason."""


class TracedCandidate:
    """Implements :class:`darts_server.engine.port.RunningCandidate`."""

    def __init__(self, running: RunningCandidate[RequestOutput], reason: FinishReason) -> None:
        self._running = running
        self._reason = reason

    def tokens(self) -> int | None:
        return self._running.tokens()

    def tokens_from(self, start: int) -> TokenSlice | None:
        return self._running.tokens_from(start)

    def stop(self) -> int:
        return self._running.stop()

    async def result(self) -> CandidateResult[RequestOutput]:
        result = await self._running.result()
        if result.finish_reason is None:
            return result
        result.output.outputs[0].finish_reason = self._reason.value
        return CandidateResult(result.tokens, self._reason, result.output)


class TracedEngine:
    """Implements :class:`darts_server.engine.port.Engine` by another engine."""

    def __init__(self, port: VllmPort, lengths: Lengths) -> None:
        self._port = port
        self._lengths = lengths
        self.newer_weights = 0
        """Versions beyond that of the engine's weights."""

    @property
    def weight_version(self) -> int:
        return self._port.weight_version + self.newer_weights

    @property
    def capacity(self) -> int | None:
        return self._port.capacity

    @property
    def kv_tokens(self) -> int | None:
        return self._port.kv_tokens

    @property
    def engines(self) -> int:
        return self._port.engines

    @property
    def unfinished(self) -> int:
        return self._port.unfinished

    @property
    def probe_width(self) -> int | None:
        return self._port.probe_width

    @property
    def has_priorities(self) -> bool:
        return self._port.has_priorities

    async def start(
        self, request: PromptRequest, index: int, probe: Probe | None = None, order: float = 0.0
    ) -> TracedCandidate:
        length, reason = self._lengths(request, index, False)
        return TracedCandidate(await self._port.start(_sized(request, length), index, probe, order), reason)

    def check_resumable(self, request: PromptRequest) -> None:
        self._port.check_resumable(request)

    async def resume(
        self, request: PromptRequest, index: int, prefix: TokenSlice, order: float = 0.0
    ) -> TracedCandidate:
        length, reason = self._lengths(request, index, True)
        return TracedCandidate(await self._port.resume(_sized(request, length), index, prefix, order), reason)

    def aborted_output(self, request: PromptRequest, prefix: TokenSlice = NOTHING) -> RequestOutput:
        return self._port.aborted_output(request, prefix)

    def finished_output(
        self, request: PromptRequest, tokens: TokenSlice, finish_reason: FinishReason, text: str
    ) -> RequestOutput:
        return self._port.finished_output(request, tokens, finish_reason, text)

    def truncate(self, request: PromptRequest, output: RequestOutput, tokens: int) -> RequestOutput:
        return self._port.truncate(request, output, tokens)

    def tokens_from(self, output: RequestOutput, start: int) -> TokenSlice:
        return self._port.tokens_from(output, start)

    def token_ids(self, request: PromptRequest, output: RequestOutput) -> tuple[Sequence[int], Sequence[int]]:
        return self._port.token_ids(request, output)


def _sized(request: PromptRequest, length: int) -> PromptRequest:
    """Return the request with the token limit of one candidate."""
    params = request.params.clone()
    params.max_tokens = length
    return replace(request, params=params)
