"""An engine port with lengths from a trace, and rollouts whose tails do not depend on chance.

Random weights produce no meaningful end of sequence. So that is ignored, each candidate's ``max_tokens`` is its length
in the trace, and its finish reason is replaced by that of the trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.outputs import RequestOutput

from darts_server.engine.port import NO_TOKENS, CandidateResult, Probe, RunningCandidate, TokenSlice
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Ticket
from darts_server.types import FinishReason
from darts_server.vllm.api.engine import VllmPort
from darts_server.vllm.requests.prompt_request import PromptRequest

Lengths = Callable[[PromptRequest, int, bool], tuple[int, FinishReason]]
"""Request, candidate index and whether it goes on from an earlier batch -> length in tokens and finish reason."""


class TracedCandidate:
    """A running candidate, in all but its result."""

    def __init__(self, running: RunningCandidate[RequestOutput], reason: FinishReason) -> None:
        self._running = running
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)

    async def result(self) -> CandidateResult[RequestOutput]:
        result = await self._running.result()
        if result.finish_reason is None:
            return result
        result.output.outputs[0].finish_reason = self._reason.value
        return CandidateResult(result.tokens, self._reason, result.output)


class TracedEngine:
    """An engine port, in all but how long candidates become and in its weight version."""

    def __init__(self, port: VllmPort, lengths: Lengths) -> None:
        self._port = port
        self._lengths = lengths
        self.newer_weights = 0
        """Versions beyond that of the engine's weights."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    @property
    def weight_version(self) -> int:
        return self._port.weight_version + self.newer_weights

    async def start(
        self,
        request: PromptRequest,
        index: int,
        probe: Probe | None = None,
        order: float = 0.0,
        prefix: TokenSlice = NO_TOKENS,
    ) -> TracedCandidate:
        length, reason = self._lengths(request, index, bool(prefix.token_ids))
        return TracedCandidate(await self._port.start(_sized(request, length), index, probe, order, prefix), reason)


def _sized(request: PromptRequest, length: int) -> PromptRequest:
    """Return the request with the token limit of one candidate."""
    params = request.params.clone()
    params.max_tokens = length
    return replace(request, params=params)


class RepeatableRollouts(Rollouts[PromptRequest, RequestOutput]):
    """``tail_seed``: of the sampled tail, by group id. A request's own seed would slow the sampling of tokens."""

    tail_seed: Callable[[str], Sequence[int]]

    def start(
        self,
        spec: GroupSpec[PromptRequest],
        allocation: Allocation,
        ticket: Ticket | None = None,
        carried: Sequence[CarriedCandidate[RequestOutput]] = (),
    ) -> GroupRun[PromptRequest, RequestOutput]:
        spec = replace(spec, tail_seed=self.tail_seed(spec.group_id))
        return super().start(spec, allocation, ticket, carried)
