"""Check the prompts of a batch, and allocate candidates to them: what happens before any of it starts."""

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT, RequestTokens
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.policy.auto.chooser import Choice
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.batches.carried import (
    CarriedGroup,
    CarriedPrompt,
    CarriedPrompts,
    Carry,
    CarryLimits,
    Identity,
    match,
)
from darts_server.rollout.batches.request import BatchRequest, NewPlanner, check_numbers, check_resumable, check_terms
from darts_server.rollout.plan import Plan
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import Ticket, caller
from darts_server.types import PromptSpec

logger = logging.getLogger(__name__)

FIELD = "prompts"
"""Named where a batch has more candidates than are admitted."""


@dataclass(frozen=True, slots=True)
class PreparedGroup(Generic[RequestT]):
    """A checked prompt with its allocation.

    ``carried``: what was kept of it since an earlier batch. ``resumed``: what its candidates go on from.
    """

    number: int
    prompt: PromptSpec
    request: RequestT
    identity: Identity
    carried: CarriedPrompt | None
    allocation: Allocation
    resumed: CarriedGroup[Any] | None

    @property
    def prompt_key(self) -> str:
        return self.identity[0]


@dataclass(frozen=True, slots=True)
class PreparedBatch(Generic[RequestT]):
    """A batch that was checked and allocated.

    ``sampling``: in force. ``terms``: see `terms_of`. ``ticket``: holds its candidates. ``enough``: complete groups
    with which it ends. ``begun``: groups that run at once, others start where one of them fails.
    """

    batch_id: str
    plan: Plan
    sampling: Mapping[str, object]
    terms: str
    groups: Sequence[PreparedGroup[RequestT]]
    ticket: Ticket
    enough: int
    begun: int


async def prepare_batch(
    batch: BatchRequest,
    rollouts: Rollouts[RequestT, OutputT],
    renderer: PromptRenderer[RequestT, OutputT],
    new_planner: NewPlanner,
    kept: CarriedPrompts,
) -> PreparedBatch[RequestT]:
    """Check and allocate a batch. Prompts that were carried over are taken from ``kept``.

    One that this server cannot render with any sampling parameters is dropped: it must not refuse all later batches.

    Raises:
        InvalidRequest: names the field; for a prompt, its number too.
        Overloaded, QuotaReached
    """
    batch_id = f"batch-{uuid.uuid4().hex}"
    plan, sampling = check_terms(batch, rollouts, renderer, new_planner)
    usual = len(batch.prompts) * rollouts.usual_candidates(plan)
    ticket = rollouts.admission.admit(batch.budget or usual, FIELD)
    taken: list[CarriedPrompt] = []
    try:
        prompts = list(batch.prompts)
        requests = [
            await _request(renderer, batch, f"prompts[{number}]", prompt, f"{batch_id}-{number}")
            for number, prompt in enumerate(prompts)
        ]
        identities = [_identity(renderer, *parts) for parts in zip(prompts, requests, strict=True)]
        if batch.takes_carried:
            taken = kept.take(caller.get().name, identities, others=batch.carried)
        carried = list(match(identities, taken))
        others, lost = await _carried_requests(renderer, batch, batch_id, _without(taken, carried))
        taken = _without(taken, lost)
        for other, request in others:
            requests.append(request)
            prompts.append(other.prompt)
            identities.append(_identity(renderer, other.prompt, request))
            carried.append(other)
        check_numbers(batch, plan, len(prompts))
        if batch.carry is Carry.RESUME:
            check_resumable(rollouts, plan, requests)
        terms, keys = terms_of(plan, sampling), [key for key, _ in identities]
        resumed = [
            _resumed(batch, terms, identity, each, kept.limits, rollouts.weight_version)
            for identity, each in zip(identities, carried, strict=True)
        ]
        tokens = [renderer.tokens(request) for request in requests]
        resumes = batch.carry is Carry.RESUME
        chosen = await rollouts.allocator.choose(plan, keys, tokens, batch.num_groups, batch.min_groups, resumes)
        allocations = _allocate(rollouts, ticket, plan, keys, tokens, batch, resumed, chosen)
    except BaseException:
        ticket.release()
        kept.put(caller.get().name, (), taken)
        raise
    parts = zip(prompts, requests, identities, carried, allocations, resumed, strict=True)
    groups = [PreparedGroup(number, *each) for number, each in enumerate(parts)]
    enough = batch.num_groups if chosen is None else chosen.num_groups
    begun = None if chosen is None else chosen.begun
    return PreparedBatch(
        batch_id, plan, sampling, terms, groups, ticket, enough or len(groups), len(groups) if begun is None else begun
    )


def _allocate(
    rollouts: Rollouts[RequestT, OutputT],
    ticket: Ticket,
    plan: Plan,
    keys: Sequence[str],
    tokens: Sequence[RequestTokens],
    batch: BatchRequest,
    resumed: Sequence[CarriedGroup[OutputT] | None],
    chosen: Choice | None,
) -> list[Allocation]:
    """Allocate candidates to all groups of a batch, and hold them. Those that go on keep theirs.

    Raises:
        Overloaded, QuotaReached, InvalidRequest: there are more than usual, and these are not admitted.
    """
    usual, room = ticket.candidates, ticket.room
    ticket.resize(0)  # a batch must not reduce its own redundancy by waiting
    cohort = rollouts.allocator.allocate_cohort(plan, keys, tokens, batch.budget, chosen, room)
    allocations = [
        fresh if group is None else replace(fresh, candidates=len(group.candidates), saturated=group.saturated)
        for fresh, group in zip(cohort, resumed, strict=True)
    ]
    ticket.resize(usual)  # in the same turn of the loop, so there is still room
    try:
        ticket.resize(sum(allocation.candidates for allocation in allocations), FIELD)
    except DartsError:
        for allocation in allocations:
            allocation.drop()
        raise
    return allocations


def terms_of(plan: Plan, sampling: Mapping[str, object]) -> str:
    """What must be the same for a group to go on in another batch, maybe of another server."""
    return f"{plan.policy} {plan.shaping!r} {plan.size} {json.dumps(sampling, sort_keys=True, default=repr)}"


def _resumed(
    batch: BatchRequest,
    terms: str,
    identity: Identity,
    carried: CarriedPrompt | None,
    limits: CarryLimits,
    version: int,
) -> CarriedGroup[Any] | None:
    """Return what a prompt's candidates go on from; ``None`` if it starts again.

    ``identity``: as it is rendered now. The server that generated its tokens may have had another chat template.
    """
    if carried is None or batch.carry is not Carry.RESUME or (group := carried.group) is None:
        return None
    usable = group.terms == terms and carried.identity == identity and len(group.candidates) >= batch.group_size
    return group if usable and group.staleness(version) <= limits.staleness else None


async def _request(
    renderer: PromptRenderer[RequestT, OutputT], batch: BatchRequest, field: str, prompt: PromptSpec, request_id: str
) -> RequestT:
    """``field``: names the prompt in errors."""
    try:
        return await renderer.make_request(prompt, batch.sampling, batch.group_size, request_id)
    except InvalidRequest as error:
        if error.field.startswith("sampling"):
            raise
        raise InvalidRequest(f"{field}.{error.field}", error.message) from error


async def _carried_requests(
    renderer: PromptRenderer[RequestT, OutputT], batch: BatchRequest, batch_id: str, others: Sequence[CarriedPrompt]
) -> tuple[list[tuple[CarriedPrompt, RequestT]], list[CarriedPrompt]]:
    """Return the requests of prompts that follow those of the batch, and the prompts that cannot be rendered.

    These were kept by a server with another chat template or a longer context.

    Raises:
        InvalidRequest: a prompt is not valid with the sampling parameters of this batch.
    """
    usable: list[tuple[CarriedPrompt, RequestT]] = []
    lost: list[tuple[CarriedPrompt, InvalidRequest]] = []
    for other in others:
        number = len(batch.prompts) + len(usable)
        name = f"{batch_id}-{number}"
        try:
            usable.append((other, await _request(renderer, batch, f"carried[{number}]", other.prompt, name)))
        except InvalidRequest as error:
            if await _is_renderable(renderer, other.prompt, name):
                raise
            lost.append((other, error))
    if lost:
        first, why = lost[0]
        logger.error(
            "%d prompts that were carried over are dropped: this server cannot render them (the first, %.64r: %.200s)",
            *(len(lost), first.identity[0], why.message),
        )
    return usable, [other for other, _ in lost]


async def _is_renderable(renderer: PromptRenderer[RequestT, OutputT], prompt: PromptSpec, request_id: str) -> bool:
    try:
        await renderer.make_request(prompt, {}, 1, request_id)
    except InvalidRequest:
        return False
    return True


def _identity(renderer: PromptRenderer[RequestT, OutputT], prompt: PromptSpec, request: RequestT) -> Identity:
    content = renderer.prompt_key(request)
    return prompt.key or content, content


def _without(prompts: Sequence[CarriedPrompt], others: Sequence[CarriedPrompt | None]) -> list[CarriedPrompt]:
    known = {id(other) for other in others}
    return [prompt for prompt in prompts if id(prompt) not in known]
