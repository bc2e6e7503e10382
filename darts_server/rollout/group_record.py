from collections.abc import Sequence

from darts_server.engine.port import UNKNOWN_TOKENS, RequestTokens
from darts_server.group.group import Group, count_sampling_pool, sampled_tail_share
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation.cohort import CohortMember
from darts_server.types import Outcome


def make_group_record(
    group: Group,
    candidates: Sequence[CandidateRecord],
    member: CohortMember | None,
    *,
    group_id: str,
    prompt_key: str | None,
    policy: str,
    outcome: Outcome,
    started_at: float,
    ended_at: float,
    owner: str | None,
    tail_wait: float | None = None,
    error: Exception | None = None,
    earlier_pass_rate: float | None = None,
    request_ids: tuple[str, ...] = (),
    tokens: RequestTokens = UNKNOWN_TOKENS,
    run_probability: float = 1.0,
    weight_version: int = 0,
) -> GroupRecord:
    rule = group.rule
    num_rewarded = None
    if rule.needs_rewards:
        num_rewarded = sum(candidate.reward is not None for candidate in candidates)

    deadline = group.deadline
    cut_length = group.cut_length
    explored = False
    auto_choice = None
    max_lost = None
    factor = 1.0
    tokens_needed = None
    if member is not None:
        cohort = member.cohort
        explored = cohort.record.explored
        auto_choice = cohort.record.auto_choice
        tokens_needed = member.tokens_needed
        if explored:
            # The group ran past its deadline: record the deadline and cut length that it would have had.
            deadline = cohort.deadline.tokens
        if cohort.rule is not None:
            max_lost = cohort.rule.max_lost
            if deadline is not None:
                # Deadline and cut length contain the factor. `Deadlines` learns lengths relative to them without it.
                factor = cohort.rule.factor
                if explored:
                    cut_length = cohort.rule.cut_length_of(deadline)

    # A group that ended before it was open has no rule, and only the candidates of the requests that had joined.
    size = len(group.candidates)
    completion_length = None
    if group.is_open:
        size = rule.size
        completion_length = group.selector.nth_shortest_length(rule.completion_place)

    # With these a trainer can compute the weights itself.
    num_shortest = None
    if rule.samples_rest and any(candidate.weight is not None for candidate in candidates):
        num_shortest = rule.num_shortest

    return GroupRecord(
        group_id=group_id,
        prompt_key=prompt_key,
        policy=policy,
        size=size,
        outcome=outcome,
        candidates=tuple(candidates),
        started_at=started_at,
        ended_at=ended_at,
        tail_wait=tail_wait,
        error=None if error is None else str(error),
        cohort_deadline=deadline,
        max_lost=max_lost,
        cut_length=cut_length,
        factor=factor,
        completion_length=completion_length,
        num_shortest=num_shortest,
        sampled_from=count_sampling_pool(group),
        tail_share=sampled_tail_share(group),
        earlier_pass_rate=earlier_pass_rate,
        explored=explored,
        tokens_needed=tokens_needed,
        request_ids=request_ids,
        auto_choice=auto_choice,
        restarted_from=group.restarted_from,
        owner=owner,
        prompt_tokens=tokens.prompt,
        max_tokens=tokens.max_tokens,
        num_rewarded=num_rewarded,
        decided_early=group.decided_early,
        run_probability=run_probability,
        weight_version=weight_version,
    )
