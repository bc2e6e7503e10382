"""Rollouts whose tails do not depend on chance."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.outputs import RequestOutput

from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.candidates import CarriedCandidate
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.rollout.spec import GroupSpec
from darts_server.serving.admission import Ticket
from darts_server.vllm.prompt_request import PromptRequest


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
