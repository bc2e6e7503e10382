"""Rollouts that log the engine's steps, and rollouts with a given seed of the sampled tail."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.outputs import RequestOutput

from benchmarks.gpu.steplog import StepLog
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.plan import Plan
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.vllm.engine import PromptRequest


class LoggedRollouts(Rollouts[PromptRequest, RequestOutput]):
    """``learning``: whether they also learn from the steps, as the server does."""

    log: StepLog
    learning = True

    def step(self, batch: int, seconds: float) -> None:
        if self.learning:
            super().step(batch, seconds)
        self.log.add(time.perf_counter(), batch, seconds)


class RepeatableRollouts(Rollouts[PromptRequest, RequestOutput]):
    """``tail_seed``: by group id. A seed of the request itself would slow the sampling of tokens."""

    tail_seed: Callable[[str], Sequence[int]]

    def run(
        self, request: PromptRequest, plan: Plan, grant: Allocation, *, group_id: str, **more: Any
    ) -> GroupRun[PromptRequest, RequestOutput]:
        return super().run(request, plan, grant, group_id=group_id, **more | {"tail_seed": self.tail_seed(group_id)})
