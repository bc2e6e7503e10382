"""A batch as its caller submits it, and the checks and the allocation of it before anything starts."""

import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic

from darts_server.caller import caller
from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, CarriedPrompts, Carry, Identity
from darts_server.rollout.batches.events import GroupResult
from darts_server.rollout.plan import UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.serving.admission import Ticket
from darts_server.types import OFF, PromptSpec, RequestOptions

logger = logging.getLogger(__name__)

NewPlanner = Callable[[Mapping[str, object]], Planner]
"""Creates the planner under a caller's policy overrides; raises ``InvalidRequest`` for an impossible one."""


SHORTEST: Mapping[str, object] = {"max_tokens": 1}
"""Sampling parameters of the shortest answer: a prompt that is too long for them is too long for all others."""


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
    survivors: bool | None = None
    carry: Carry = Carry.DROP
    carried: bool = False


@dataclass(slots=True, eq=False)
class BatchGroup(Generic[RequestT, OutputT]):
    """A checked prompt of a batch with its allocation, and what has become of its group.

    ``content_key``: of what the model sees. ``carried``: what was kept of it since an earlier batch. ``resumed``: what
    its candidates go on from, or those of a later batch once it was stopped.
    """

    number: int
    prompt: PromptSpec
    request: RequestT
    prompt_key: str
    content_key: str
    carried: CarriedPrompt | None = None
    resumed: CarriedGroup[OutputT] | None = None
    allocation: Allocation = field(default=Allocation(0))
    has_started: bool = False
    is_decided: bool = False
    """Whether its caller gets its outcome."""
    run: GroupRun[RequestT, OutputT] | None = None
    """``None`` before it has started and once it is decided."""
    interrupted: DartsError | None = None
    """Why it was aborted and is not decided."""
    handed_back: GroupResult | None = None
    """What was generated for one that is not decided, if that is not kept."""

    @property
    def identity(self) -> Identity:
        return self.prompt_key, self.content_key


@dataclass(frozen=True, slots=True)
class PreparedBatch(Generic[RequestT, OutputT]):
    """A batch that was checked and allocated, and of which nothing has started.

    ``sampling``: the sampling parameters in force.
    ``terms``: see `terms_of`; empty unless the batch resumes prompts.
    ``ticket``: holds the candidates of the batch.
    ``needed``: number of complete groups with which the batch ends.
    ``places``: number of groups that run at once. Another group starts when one of them fails.
    """

    batch_id: str
    plan: Plan
    sampling: Mapping[str, object]
    terms: str
    groups: Sequence[BatchGroup[RequestT, OutputT]]
    ticket: Ticket
    needed: int
    places: int
    carry: Carry


async def prepare_batch(
    batch: BatchRequest,
    rollouts: Rollouts[RequestT, OutputT],
    renderer: PromptRenderer[RequestT, OutputT],
    new_planner: NewPlanner,
    kept: CarriedPrompts,
) -> PreparedBatch[RequestT, OutputT]:
    """Check and allocate a batch. Prompts that were carried over are taken from ``kept``.

    One that this server cannot render with any sampling parameters is dropped: it must not refuse all later batches.

    Raises:
        InvalidRequest: names the field; for a prompt, its number too.
        Overloaded, QuotaReached
    """
    batch_id = f"batch-{uuid.uuid4().hex}"
    plan = check_terms(batch, rollouts, new_planner)
    sampling = renderer.effective_sampling(batch.sampling)
    usual = len(batch.prompts) * rollouts.usual_candidates(plan)
    ticket = rollouts.admission.admit(batch.budget or usual, "prompts")
    groups: list[BatchGroup[RequestT, OutputT]] = []
    taken: list[CarriedPrompt] = []

    async def add(field: str, prompt: PromptSpec, carried: CarriedPrompt | None = None) -> None:
        number = len(groups)
        try:
            request = await renderer.make_request(prompt, batch.sampling, batch.group_size, f"{batch_id}-{number}")
        except InvalidRequest as error:
            if error.field.startswith("sampling"):
                raise
            raise InvalidRequest(f"{field}[{number}].{error.field}", error.message) from error
        content_key = renderer.prompt_key(request)
        groups.append(BatchGroup(number, prompt, request, prompt.key or content_key, content_key, carried))

    try:
        # Its own prompts, and those that follow them.
        for prompt in batch.prompts:
            await add("prompts", prompt)
        if batch.carried or batch.carry is not Carry.DROP:
            found = kept.take(caller.get().name, [group.identity for group in groups], others=batch.carried)
            taken = [old for _, old in found]
            lost: list[tuple[CarriedPrompt, InvalidRequest]] = []
            for place, old in found:
                if place is not None:
                    groups[place].carried = old
                    continue
                try:
                    await add("carried", old.prompt, old)
                except InvalidRequest as error:
                    try:
                        await renderer.make_request(old.prompt, SHORTEST, 1, batch_id)
                    except InvalidRequest:  # its server had another chat template or a longer context
                        lost.append((old, error))
                    else:
                        raise
            if lost:
                gone = {id(old) for old, _ in lost}
                taken = [old for old in taken if id(old) not in gone]
                logger.error(
                    "%d prompts that were carried over are dropped: this server cannot render them (the first, %.64r: "
                    "%.200s)",
                    *(len(lost), lost[0][0].identity[0], lost[0][1].message),
                )
        check_numbers(batch, plan, len(groups))

        # What their candidates go on from.
        resumes = batch.carry is Carry.RESUME
        if resumes:
            if plan.shaping.prunes:
                raise InvalidRequest(
                    "carry",
                    f"'resume' does not work under policy {plan.policy!r}, whose decisions depend on more than "
                    "lengths; use 'restart'",
                )
            rollouts.engine.check_resumable(groups[0].request)  # all have the same sampling parameters
        terms, version = terms_of(plan, sampling) if resumes else "", rollouts.engine.weight_version
        unusable = 0  # tokens
        for group in groups:
            if resumes and group.carried is not None and (earlier := group.carried.group) is not None:
                # As rendered now: its server may have had another chat template.
                is_same = earlier.terms == terms and group.carried.identity == group.identity
                is_whole = len(earlier.candidates) >= batch.group_size
                if is_same and is_whole and earlier.staleness(version) <= kept.limits.staleness:
                    group.resumed = earlier
                else:
                    unusable += earlier.tokens

        # Their candidates.
        needed = batch.num_groups or len(groups)
        places = len(groups)
        auto = None
        if plan.auto is not None and resumes:
            auto = rollouts.allocator.auto.choose(plan.auto, plan.size, needed, len(groups), unusable)
            places = auto.choice.begun
        held = ticket.candidates
        ticket.resize(0)  # a batch must not reduce its own redundancy by waiting
        keys = [group.prompt_key for group in groups]
        allocations = rollouts.allocator.allocate_cohort(plan, keys, batch.budget, auto)
        candidates = 0
        for group, allocation in zip(groups, allocations, strict=True):
            if (resumed := group.resumed) is not None:  # it keeps them
                allocation = replace(allocation, candidates=len(resumed.candidates), saturated=resumed.saturated)
            group.allocation = allocation
            candidates += allocation.candidates
        ticket.resize(held)  # in the same turn of the loop, so there is still room
        try:
            ticket.resize(candidates, "prompts")
        except DartsError:  # there are more than usual, and these are not admitted
            for group in groups:
                group.allocation.drop()
            raise
    except BaseException:
        ticket.release()
        kept.put(caller.get().name, (), taken)
        raise
    return PreparedBatch(batch_id, plan, sampling, terms, groups, ticket, needed, places, batch.carry)


def check_terms(batch: BatchRequest, rollouts: Rollouts[RequestT, OutputT], new_planner: NewPlanner) -> Plan:
    """Check all of a batch but its prompts and its sampling parameters; return its plan.

    Raises:
        InvalidRequest: names the field.
    """
    if batch.carried and batch.carry is Carry.DROP and batch.num_groups is not None:
        raise InvalidRequest(
            "carry", 'must be "resume" or "restart" where num_groups may leave carried prompts undecided; add one'
        )
    planner = new_planner(batch.policy) if batch.policy else rollouts.planner
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
        if not plan.shaping.prunes:
            raise InvalidRequest(
                "survivors",
                f"policy {plan.policy!r} does not prune; leave it out, or use a policy that prunes, such as 'arrol'",
            )
        plan = replace(plan, shaping=replace(plan.shaping, return_survivors=True))
    if batch.budget is not None and plan.auto is not None:
        raise InvalidRequest("budget", f"policy {plan.policy!r} chooses the number of candidates itself; leave it out")
    if plan.shaping.prunes:
        rollouts.check_scorable(plan)
    return plan


def check_numbers(batch: BatchRequest, plan: Plan, prompts: int) -> None:
    """Check what depends on the number of prompts, those that were carried over included.

    Raises:
        InvalidRequest
    """
    if not prompts:
        raise InvalidRequest("prompts", "must have at least one prompt, got none, and none was carried over")
    if batch.budget is not None:
        low, high = plan.shaping.bounds(plan.size)
        if not prompts * low <= batch.budget <= prompts * high:
            raise InvalidRequest(
                "budget",
                f"must be {prompts * low} to {prompts * high} for {prompts} groups of {plan.size} under policy "
                f"{plan.policy!r}, got {batch.budget}; change it, or leave it out",
            )
    if batch.num_groups is not None and not 1 <= batch.num_groups <= prompts:
        raise InvalidRequest("num_groups", f"must be 1 to {prompts}, the number of prompts, got {batch.num_groups}")


def terms_of(plan: Plan, sampling: Mapping[str, object]) -> str:
    """What must be the same for a group to go on in another batch, maybe of another server."""
    return f"{plan.policy} {plan.shaping!r} {plan.size} {json.dumps(sampling, sort_keys=True, default=repr)}"
