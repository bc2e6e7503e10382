"""Check a batch and allocate its candidates, before it starts."""

import json
import logging
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import ceil
from typing import Any, Literal

from darts_server.caller import caller
from darts_server.engine.port import PromptRenderer
from darts_server.estimates.reward_stats import RewardStats
from darts_server.exceptions import DartsError, InvalidRequest
from darts_server.rollout.allocation.auto import AutoBatch
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.batches.carried import CarriedGroup, CarriedPrompt, CarriedPrompts, Carry, Identity
from darts_server.rollout.batches.events import GroupResult
from darts_server.rollout.plan import UNSHAPED, Plan, Planner
from darts_server.rollout.rollouts import Rollouts
from darts_server.rollout.run import GroupRun
from darts_server.serving.admission import Ticket
from darts_server.types import OFF, PromptSpec, RequestOptions
from darts_server.verify.types import Verifier

logger = logging.getLogger(__name__)

NewPlanner = Callable[[Mapping[str, object]], Planner]
"""Applies a caller's policy overrides, or raises ``InvalidRequest``."""

SHORTEST: Mapping[str, object] = {"max_tokens": 1}
"""A prompt that is too long for this answer is too long for any answer."""

DRAW_BYTES = 8
"""Precision of the draws that skip prompts."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch as its caller submits it.

    ``prompts``: at least one, unless ``carried`` is set.
    ``group_size``: M, trajectories per group.
    ``policy``: overrides of the policy settings by name, with the policy under ``name``.
    ``budget``: number of candidates in all. None leaves it to the policy.
    ``num_groups``: complete groups after which the batch ends, or None for all.
    ``survivors``: whether to return all trajectories that are not pruned. None leaves it to the policy.
    ``carried``: whether to add all other prompts that were carried over for the caller.
    ``verifier``: empty to verify nothing, or None for all verifiers.
    ``only``: which complete groups count, or None for all. Others take the places of groups that do not count.
    ``max_prompts``: number of prompts that may run, or None for all.
    ``return_zero_variance``: whether groups that do not count are returned too.
    ``stop_when``: whether a group ends as soon as it can return candidates with unequal rewards.
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
    verifier: Sequence[str] | None = None
    only: Literal["informative"] | None = None
    max_prompts: int | None = None
    return_zero_variance: bool = False
    stop_when: Literal["decided"] | None = None

    def counts_group(self, zero_variance: bool | None) -> bool:
        """``zero_variance``: see `GroupRun.zero_variance`."""
        return self.only is None or zero_variance is False

    def returns_group(self, zero_variance: bool | None) -> bool:
        return self.return_zero_variance or self.counts_group(zero_variance)


@dataclass(slots=True, eq=False)
class BatchGroup:
    """A checked prompt of a batch, and the state of its group.

    ``content_key``: hash of everything that the model sees.
    ``resumed``: tokens from which the candidates continue, here or after a stop in a later batch.
    """

    number: int
    group_id: str
    prompt: PromptSpec
    request: Any
    prompt_key: str
    content_key: str
    carried: CarriedPrompt | None = None
    resumed: CarriedGroup[Any] | None = None
    allocation: Allocation = field(default=Allocation(0))
    has_started: bool = False
    is_decided: bool = False
    """Whether the caller gets an outcome."""
    run: GroupRun[Any, Any] | None = None
    """None before the group starts and after it is decided."""
    interrupted: DartsError | None = None
    handed_back: GroupResult | None = None
    """Tokens of an undecided group that are returned instead of kept."""
    verifiers: Sequence[str] | None = None
    run_probability: float = 1.0
    """Below 1 if the prompt is almost surely without signal."""
    is_skipped: bool = False

    @property
    def identity(self) -> Identity:
        return self.prompt_key, self.content_key


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch that is ready to start.

    ``request``: without prompts.
    ``sampling``: the sampling parameters in force.
    ``terms``: see `describe_terms`; empty unless the batch resumes prompts.
    ``groups``: also of skipped prompts.
    ``num_needed``: the batch ends after this number of groups that count.
    ``num_running``: groups that run at once. Another group starts when a group fails or does not count.
    """

    batch_id: str
    request: BatchRequest
    plan: Plan
    sampling: Mapping[str, object]
    terms: str
    groups: Sequence[BatchGroup]
    ticket: Ticket
    num_needed: int
    num_running: int


async def prepare_batch(
    batch: BatchRequest,
    rollouts: Rollouts[Any, Any],
    renderer: PromptRenderer[Any, Any],
    new_planner: NewPlanner,
    carried_prompts: CarriedPrompts,
) -> PreparedBatch:
    """Check and allocate a batch.

    Raises:
        InvalidRequest: names the field, and the number of the prompt.
        Overloaded, QuotaReached
    """
    owner = caller.get().name
    plan = plan_batch(batch, rollouts, new_planner)
    sampling = renderer.effective_sampling(batch.sampling)
    estimated_candidates = len(batch.prompts) * rollouts.estimate_candidates(plan)
    ticket = rollouts.admission.admit(batch.budget or estimated_candidates, "prompts")
    # Prompts that are carried over again if the batch is refused.
    taken: list[CarriedPrompt] = []
    try:
        builder = GroupBuilder(batch, renderer, rollouts.verifier)
        for prompt in batch.prompts:
            await builder.add_group("prompts", prompt)
        groups = builder.groups
        if batch.carried or batch.carry is not Carry.DROP:
            numbered_prompts = carried_prompts.take(owner, [group.identity for group in groups], others=batch.carried)
            taken = [prompt for _, prompt in numbered_prompts]
            # Prompts that this server cannot render are dropped.
            taken = await builder.add_carried(numbered_prompts)
        check_counts(batch, plan, len(groups))

        # Choose the groups that continue from generated tokens.
        terms = ""
        lost_tokens = 0
        if batch.carry is Carry.RESUME:
            if plan.shaping.prunes:
                raise InvalidRequest(
                    "carry",
                    f"'resume' does not work under policy {plan.policy!r}, whose decisions depend on more than "
                    "lengths; use 'restart'",
                )
            # All groups have the same sampling parameters.
            rollouts.engine.check_resumable(groups[0].request)
            terms = describe_terms(plan, sampling)
            lost_tokens = choose_resumed_groups(
                groups,
                terms,
                batch.group_size,
                rollouts.engine.weight_version,
                carried_prompts.limits.staleness,
            )

        # Choose how many groups run at once, and allocate candidates.
        if batch.carry is Carry.DROP:
            # A carried prompt would be drawn again in the next batch.
            draw_skipped_groups(groups, plan, rollouts, renderer)
        num_running = sum(not group.is_skipped for group in groups)
        num_needed = batch.num_groups or num_running
        if batch.only is not None and batch.carry is not Carry.RESUME:
            # Enough of these groups are expected to count. Others may start later.
            num_running = min(num_running, estimate_prompts_to_run(num_needed, rollouts.statistics.rewards.dataset))
        auto = None
        if plan.auto is not None and batch.carry is Carry.RESUME:
            auto = rollouts.allocator.auto.choose(plan.auto, plan.size, num_needed, len(groups), lost_tokens)
            num_running = auto.choice.started
        num_starting = min(num_running, batch.max_prompts or num_running)
        allocate_groups(groups, plan, batch.budget, rollouts, ticket, auto, num_starting)
        rollouts.observers.prompts_skipped(sum(group.is_skipped for group in groups))
    except BaseException:
        ticket.release()
        carried_prompts.put(owner, (), taken)
        raise
    return PreparedBatch(
        batch_id=builder.batch_id,
        request=replace(batch, prompts=()),
        plan=plan,
        sampling=sampling,
        terms=terms,
        groups=groups,
        ticket=ticket,
        num_needed=num_needed,
        num_running=num_running,
    )


class GroupBuilder:
    def __init__(
        self,
        batch: BatchRequest,
        renderer: PromptRenderer[Any, Any],
        verifier: Verifier | None,
    ) -> None:
        self.batch_id = f"batch-{uuid.uuid4().hex}"
        self.groups: list[BatchGroup] = []
        self._batch = batch
        self._renderer = renderer
        self._verifier = verifier

    async def add_group(self, list_name: str, prompt: PromptSpec, carried: CarriedPrompt | None = None) -> None:
        """``list_name``: names the prompt's list in errors."""
        number = len(self.groups)
        batch = self._batch
        group_id = f"{self.batch_id}-{number}"
        try:
            request = await self._renderer.make_request(prompt, batch.sampling, batch.group_size, group_id)
        except InvalidRequest as error:
            if error.field.startswith("sampling"):
                raise
            raise InvalidRequest(f"{list_name}[{number}].{error.field}", error.message) from error
        content_key = self._renderer.prompt_key(request)
        self.groups.append(
            BatchGroup(
                number,
                group_id,
                prompt,
                request,
                prompt.key or content_key,
                content_key,
                carried,
                verifiers=self._choose_verifiers(prompt),
            )
        )

    def _choose_verifiers(self, prompt: PromptSpec) -> Sequence[str] | None:
        verifier_names = self._batch.verifier if prompt.verifier is None else prompt.verifier
        if verifier_names is None or self._verifier is None:
            return None
        # A carried prompt may name verifiers of an earlier server.
        return [name for name in verifier_names if name in self._verifier.names]

    async def add_carried(self, numbered_prompts: Sequence[tuple[int | None, CarriedPrompt]]) -> list[CarriedPrompt]:
        """Add prompts to the groups with their numbers, or in new groups; return the added prompts."""
        added: list[CarriedPrompt] = []
        dropped: list[tuple[str, str]] = []
        for number, carried in numbered_prompts:
            if number is not None:
                self.groups[number].carried = carried
                added.append(carried)
                continue
            try:
                await self.add_group("carried", carried.prompt, carried)
                added.append(carried)
            except InvalidRequest as error:
                # A prompt that no sampling parameters fit would fail every batch.
                if await self._can_render(carried.prompt):
                    raise
                dropped.append((carried.identity[0], error.message))
        if dropped:
            key, message = dropped[0]
            logger.error(
                "%d prompts that were carried over are dropped: this server cannot render them (the first, %.64r: "
                "%.200s)",
                len(dropped),
                key,
                message,
            )
        return added

    async def _can_render(self, prompt: PromptSpec) -> bool:
        # The earlier server may have had another chat template or a longer context.
        try:
            await self._renderer.make_request(
                prompt,
                SHORTEST,
                size=1,
                request_id=self.batch_id,
            )
        except InvalidRequest:
            return False
        return True


def estimate_prompts_to_run(num_needed: int, rewards: RewardStats) -> int:
    """Return how many prompts to run, so that about ``num_needed`` groups have unequal rewards."""
    # One more informative group makes the share 1 without rewards, and keeps it above 0.
    informative_share = (rewards.groups - rewards.zero_variance + 1) / (rewards.groups + 1)
    return ceil(num_needed / informative_share)


def choose_resumed_groups(
    groups: Sequence[BatchGroup],
    terms: str,
    group_size: int,
    weight_version: int,
    max_staleness: int,
) -> int:
    """Let groups continue from carried tokens; return the number of tokens that cannot be used."""
    lost_tokens = 0
    for group in groups:
        if group.carried is None or group.carried.group is None:
            continue
        carried_group = group.carried.group
        has_equal_terms = carried_group.terms == terms
        # An earlier server may have had another chat template.
        has_equal_prompt = group.carried.identity == group.identity
        has_enough_candidates = len(carried_group.candidates) >= group_size
        is_fresh = carried_group.staleness(weight_version) <= max_staleness
        if has_equal_terms and has_equal_prompt and has_enough_candidates and is_fresh:
            group.resumed = carried_group
        else:
            lost_tokens += carried_group.tokens
    return lost_tokens


def draw_skipped_groups(
    groups: Sequence[BatchGroup],
    plan: Plan,
    rollouts: Rollouts[Any, Any],
    renderer: PromptRenderer[Any, Any],
) -> None:
    """Draw which of the prompts run that are almost surely without signal."""
    probabilities = rollouts.allocator.run_probabilities(plan, [group.prompt_key for group in groups])
    version = rollouts.engine.weight_version
    for group, probability in zip(groups, probabilities, strict=True):
        group.run_probability = probability
        if probability < 1:
            # The caller's seed repeats the draw. The version changes it, so that a trainer that always sends the same
            # seed does not skip a prompt for ever.
            seed = renderer.tail_seed(group.request) or (secrets.randbits(64),)
            digest = blake2b(f"{seed} {version}".encode(), digest_size=DRAW_BYTES).digest()
            draw = int.from_bytes(digest)
            num_draws = 256**DRAW_BYTES
            group.is_skipped = draw >= probability * num_draws


def allocate_groups(
    groups: Sequence[BatchGroup],
    plan: Plan,
    budget: int | None,
    rollouts: Rollouts[Any, Any],
    ticket: Ticket,
    auto: AutoBatch | None,
    num_starting: int,
) -> None:
    """Allocate candidates, and hold them with the batch's ticket."""
    # Waiting candidates lower redundancy, and this batch's candidates must not count.
    estimated_candidates = ticket.candidates
    ticket.resize(0)
    prompt_keys = [group.prompt_key for group in groups]
    # Skipped prompts take part, so that skipping does not change the candidates of other prompts.
    allocations = rollouts.allocator.allocate_cohort(plan, prompt_keys, budget, auto, num_starting)
    num_candidates = 0
    for group, allocation in zip(groups, allocations, strict=True):
        if group.is_skipped:
            allocation.drop()
            continue
        group.allocation = allocation
        if group.resumed is not None:
            group.allocation = replace(
                allocation,
                candidates=len(group.resumed.candidates),
                saturated=group.resumed.saturated,
            )
        num_candidates += group.allocation.candidates

    # No turn of the event loop has passed, so the estimate still fits.
    ticket.resize(estimated_candidates)
    try:
        ticket.resize(num_candidates, "prompts")
    except DartsError:
        # A skipped group has an empty allocation.
        for group in groups:
            group.allocation.drop()
        raise


def plan_batch(batch: BatchRequest, rollouts: Rollouts[Any, Any], new_planner: NewPlanner) -> Plan:
    """Check everything but prompts and sampling parameters."""
    if batch.carried and batch.carry is Carry.DROP and batch.num_groups is not None:
        raise InvalidRequest(
            "carry",
            'must be "resume" or "restart" if num_groups may leave carried prompts undecided; add "carry"',
        )
    planner = rollouts.planner
    if batch.policy:
        planner = new_planner(batch.policy)
    if not batch.prompts and not batch.carried:
        raise InvalidRequest("prompts", "must have at least one prompt, got none")

    # Without this, a group of one would count as a single request of a group of --group-size.
    options = RequestOptions()
    if batch.group_size == 1:
        options = RequestOptions(group_size=1)
    try:
        plan = planner.plan(batch.group_size, options, in_batch=True) or Plan(OFF, UNSHAPED, batch.group_size)
    except InvalidRequest as error:
        # Routes of vLLM's API call this field "n".
        field = "group_size" if error.field in ("n", "group size") else error.field
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
        rollouts.check_can_prune(plan)
    check_verifiers(batch, plan, rollouts.verifier)
    return plan


def check_verifiers(batch: BatchRequest, plan: Plan, verifier: Verifier | None) -> None:
    if batch.stop_when is not None and not plan.shaping.needs_rewards:
        raise InvalidRequest(
            "stop_when",
            f"needs a policy that selects by rewards, and {plan.policy!r} does not; use policy 'informative', or leave "
            "it out",
        )
    rewards_needed_by = None
    if plan.shaping.needs_rewards:
        rewards_needed_by = "policy"
    elif batch.only is not None:
        rewards_needed_by = "only"
    if rewards_needed_by is not None and verifier is None:
        raise InvalidRequest(
            rewards_needed_by,
            "needs rewards while groups run, and this server has no verifier; start it with --verifier, or use "
            "policy 'off' without 'only'",
        )

    server_verifiers = () if verifier is None else verifier.names
    fields = [("verifier", batch.verifier)]
    for number, prompt in enumerate(batch.prompts):
        fields.append((f"prompts[{number}].verifier", prompt.verifier))
    for field_name, names in fields:
        if names is None:
            continue
        if not names and rewards_needed_by is not None:
            raise InvalidRequest(
                field_name, f"must not be false, because {rewards_needed_by!r} needs rewards; leave it out"
            )
        for name in names:
            if name not in server_verifiers:
                remedy = "start the server with --verifier"
                if server_verifiers:
                    remedy = f"choose from {', '.join(server_verifiers)}"
                raise InvalidRequest(field_name, f"has {name!r}, which this server does not have; {remedy}")


def check_counts(batch: BatchRequest, plan: Plan, num_prompts: int) -> None:
    """``num_prompts``: with carried prompts."""
    if not num_prompts:
        raise InvalidRequest("prompts", "must have at least one prompt, got none, and none was carried over")
    if batch.budget is not None:
        low, high = plan.shaping.candidate_limits(plan.size)
        if not num_prompts * low <= batch.budget <= num_prompts * high:
            raise InvalidRequest(
                "budget",
                f"must be {num_prompts * low} to {num_prompts * high} for {num_prompts} groups of {plan.size} under "
                f"policy {plan.policy!r}, got {batch.budget}; change it, or leave it out",
            )
    if batch.num_groups is not None and not 1 <= batch.num_groups <= num_prompts:
        raise InvalidRequest("num_groups", f"must be 1 to {num_prompts}, the number of prompts, got {batch.num_groups}")
    num_needed = batch.num_groups or num_prompts
    if batch.max_prompts is not None and batch.max_prompts < num_needed:
        raise InvalidRequest(
            "max_prompts", f"must be at least the number of groups to return, {num_needed}, got {batch.max_prompts}"
        )


def describe_terms(plan: Plan, sampling: Mapping[str, object]) -> str:
    """A batch can resume groups of batches with the same terms."""
    return f"{plan.policy} {plan.shaping!r} {plan.size} {json.dumps(sampling, sort_keys=True, default=repr)}"
