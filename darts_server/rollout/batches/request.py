"""What the caller of a batch submits, and the checks of it that look at no prompt."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import InvalidRequest
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.plan import UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.spec import OnAbort
from darts_server.types import OFF, PromptSpec, RequestOptions

NewPlanner = Callable[[Mapping[str, object]], Planner]
"""Creates the planner under a caller's policy overrides; raises ``InvalidRequest`` for an impossible one."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch as its caller submits it: a group of ``group_size`` for each prompt.

    Args:
        prompts: at least one, or ``carried``.
        group_size: M, trajectories per group.
        sampling: the engine's sampling parameters by name.
        policy: overrides of the server's policy settings by name, and under ``name`` which policy.
        budget: candidates in all; ``None`` leaves it to the policy.
        num_groups: complete groups that are enough, the first to be decided; ``None`` for all.
        min_groups: complete groups with which the batch may end, if the policy chooses so; ``None`` for all.
        survivors: return all trajectories that are not pruned, more or fewer than ``group_size``; ``None`` leaves it to
            the policy.
        carry: what happens to prompts that are not decided. Unless they are dropped, prompts of this batch that were
            carried over from earlier ones start first.
        carried: all other prompts of the caller that were carried over are part of this batch, after ``prompts``.
    """

    prompts: Sequence[PromptSpec]
    group_size: int
    sampling: Mapping[str, object] = field(default_factory=dict)
    policy: Mapping[str, object] = field(default_factory=dict)
    budget: int | None = None
    num_groups: int | None = None
    min_groups: int | None = None
    survivors: bool | None = None
    carry: Carry = Carry.DROP
    carried: bool = False

    @property
    def on_abort(self) -> OnAbort:
        """What happens to a group that is aborted."""
        if self.carry is Carry.RESUME:
            return OnAbort.CARRY
        return OnAbort.RETURN if self.carry is Carry.DROP else OnAbort.FAIL

    @property
    def takes_carried(self) -> bool:
        """Whether it takes prompts that were carried over."""
        return self.carried or self.carry is not Carry.DROP


def check_terms(
    batch: BatchRequest,
    rollouts: Rollouts[RequestT, OutputT],
    renderer: PromptRenderer[RequestT, OutputT],
    new_planner: NewPlanner,
) -> tuple[Plan, Mapping[str, object]]:
    """Check all of a batch but its prompts; return its plan and the sampling parameters in force.

    Raises:
        InvalidRequest: names the field.
    """
    if batch.min_groups is not None:
        _check_deferrable(batch)
    plan = _plan(batch, new_planner(batch.policy))
    rollouts.check_scorable(plan)
    return plan, renderer.effective_sampling(batch.sampling)


def _check_deferrable(batch: BatchRequest) -> None:
    if batch.num_groups is not None:
        raise InvalidRequest(
            "min_groups", "leaves to the policy what num_groups says: how many groups are enough; leave out one of them"
        )
    if batch.carry is Carry.DROP:
        raise InvalidRequest(
            "min_groups", 'is only valid with "carry": "resume" or "restart", which keep the other prompts; add one'
        )


def _plan(batch: BatchRequest, planner: Planner) -> Plan:
    if not batch.prompts and not batch.carried:
        raise InvalidRequest("prompts", "must have at least one prompt, got none")
    # A group of one would otherwise be taken for a single request, of a group of --group-size.
    options = RequestOptions(group_size=1) if batch.group_size == 1 else RequestOptions()
    try:
        plan = planner.plan(batch.group_size, options, in_batch=True) or Plan(OFF, UNSHAPED, batch.group_size)
    except InvalidRequest as error:
        field = "group_size" if error.field in ("n", "group size") else error.field  # as vLLM's routes name it
        raise InvalidRequest(field, error.message) from error
    if batch.survivors or (batch.survivors is None and plan.shaping.may_return_survivors):
        plan = _with_survivors(plan)
    if batch.budget is not None and plan.auto is not None:
        raise InvalidRequest("budget", f"policy {plan.policy!r} chooses the number of candidates itself; leave it out")
    return plan


def check_numbers(batch: BatchRequest, plan: Plan, prompts: int) -> None:
    """Check what depends on the number of prompts, those that were carried over included.

    Raises:
        InvalidRequest
    """
    if not prompts:
        raise InvalidRequest("prompts", "must have at least one prompt, got none, and none was carried over")
    low, high = (prompts * bound for bound in plan.shaping.bounds(plan.size))
    if batch.budget is not None and not low <= batch.budget <= high:
        raise InvalidRequest(
            "budget",
            f"must be {low} to {high} for {prompts} groups of {plan.size} under policy {plan.policy!r}, "
            f"got {batch.budget}; change it, or leave it out",
        )
    if batch.num_groups is not None and not 1 <= batch.num_groups <= prompts:
        raise InvalidRequest("num_groups", f"must be 1 to {prompts}, the number of prompts, got {batch.num_groups}")
    if batch.min_groups is not None and not 1 <= batch.min_groups < prompts:
        raise InvalidRequest(
            "min_groups",
            f"must be at least 1 and below {prompts}, the number of prompts, got {batch.min_groups}; change it, or "
            "leave it out",
        )


def check_resumable(rollouts: Rollouts[RequestT, OutputT], plan: Plan, requests: Sequence[RequestT]) -> None:
    """
    Raises:
        InvalidRequest: candidates cannot go on as if they had not been stopped.
    """
    if plan.shaping.prunes:
        raise InvalidRequest(
            "carry",
            f"'resume' does not work under policy {plan.policy!r}, whose decisions depend on more than lengths; use "
            "'restart'",
        )
    rollouts.check_resumable(requests[0])  # all have the same sampling parameters


def _with_survivors(plan: Plan) -> Plan:
    if not plan.shaping.prunes:
        raise InvalidRequest(
            "survivors",
            f"policy {plan.policy!r} does not prune; leave it out, or use a policy that prunes, such as 'arrol'",
        )
    return replace(plan, shaping=replace(plan.shaping, return_survivors=True))
