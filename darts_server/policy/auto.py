"""`auto`: how many prompts of a batch run at once. Prompts that are left over are resumed in the next batch.

Running more prompts than are needed keeps the engine full while the longest answers finish. It costs tokens of older
weights, and larger batches, and helps only if some answers are much longer than others.

Times are relative to the batch alone: the seconds of the returned trajectories if all of them started together and
nothing else ran (`LatencyCurve.completion_seconds`). If too many groups end together with the last group, for example
at the length limit, the engine stays full, and `auto` does not run ahead whatever was measured.

The first batches run ahead. If they are not clearly faster than the batch alone, `auto` also measures batches that run
only the needed prompts, and continues with the faster kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from darts_server.estimates.checks import LARGEST, check_count, check_length, check_number

MIN_AHEAD = 5
"""Measured batches that ran ahead before fewer prompts may run. The first batches return the shorter prompts and carry
the longer ones over, so they look slower than later batches."""
CLEARLY_FASTER = 0.8
"""Up to this relative time, running ahead is kept without measuring the other kind of batch."""
MARGIN = 0.03
"""Share by which running ahead must be faster if the last batch did not run ahead, against going back and forth."""
ENDING_LAST_SHARE = 0.03
"""Last share of a batch's time, when groups count as ending last."""
NEARLY_EQUAL = 1.1
"""Factor between both times below which the slower kind is tested now and then."""
MAX_BATCHES_UNMEASURED = 256
"""Batches after which the slower kind is tested in any case."""
TEST_BATCHES = 2
"""Batches of a test. The first batch only changes the carried prompts, and the second batch is measured."""
MAX_KEPT_BATCHES = 5
"""Kept measured batches of each kind. Their median ignores a delayed batch."""
MIN_CHANGE = 0.5
MAX_CHANGE = 1.25
"""Limits of the factor on the share of prompts that run ahead, from batch to batch."""
MIN_SHARE_AHEAD = 1 / 64
"""Smallest share of extra prompts. With none, nothing more would be learned."""
MAX_RELATIVE_TIME = 150.0
"""Largest accepted relative time."""

Measured = tuple[int, float]
"""Number of a batch, and its relative time."""


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Limits that the user sets for `auto`.

    ``most_stale``: largest share of returned tokens from older weights, on average over batches. ``exploration``:
    largest share of batches that test the kind that is expected to be slower.
    """

    most_stale: float = 0.5
    exploration: float = 0.05


@dataclass(frozen=True, slots=True)
class AheadState:
    """Measurements of running ahead. ``AheadState(**json)`` restores them.

    ``batches``, ``tested``: finished batches, and batches in tests. ``share``: share of the extra prompts that may run
    ahead. ``prefers_ahead``: whether the last batch outside tests that could run ahead did so.
    ``ran_ahead``: whether the last batch ran ahead. ``ahead``, ``alone``: latest measured batches that ran ahead, and
    that ran only the needed prompts. ``ending_last``: share of a batch's groups that end together with its last group;
    each batch counts half as much as the next.
    """

    batches: int = 0
    tested: int = 0
    share: float = 1.0
    prefers_ahead: bool = False
    ran_ahead: bool = False
    ahead: Sequence[Measured] = ()
    alone: Sequence[Measured] = ()
    ending_last: float = 0.0

    def __post_init__(self) -> None:
        check_count("batches", self.batches)
        check_count("tested", self.tested)
        check_number("share", self.share, 0.0, 1.0)
        check_number("ending_last", self.ending_last, 0.0, 1.0)
        for name in ("prefers_ahead", "ran_ahead"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        for name in ("ahead", "alone"):
            measured = getattr(self, name)
            check_length(name, measured, MAX_KEPT_BATCHES)
            for batch, time in measured:
                check_count(name, batch)
                check_number(name, time, 1 / MAX_RELATIVE_TIME, MAX_RELATIVE_TIME)
                if batch > self.batches:
                    raise ValueError(f"{name} must have only the {self.batches} batches that have ended, got {batch}")
            # JSON has lists only.
            object.__setattr__(self, name, tuple((batch, time) for batch, time in measured))

    @property
    def relative_time(self) -> float | None:
        """Time of a batch that runs ahead, relative to a batch that runs only the needed prompts.

        The latter is estimated until it is measured. None before `MIN_AHEAD` batches.
        """
        if len(self.ahead) < MIN_AHEAD:
            return None
        ahead = median(time for _, time in self.ahead)
        # Measured times are relative to the estimate already, so the estimate itself is 1.
        alone = 1.0
        if self.alone:
            alone = median(time for _, time in self.alone)
        return ahead / alone


@dataclass(frozen=True, slots=True)
class AheadChoice:
    """The choice for a batch.

    ``needed``: number of complete groups that end the batch. ``started``: number of ``offered`` prompts that run at
    once. ``reason``: the choice in words. ``is_test``: whether the other kind of batch was expected to be faster.
    """

    needed: int
    offered: int
    started: int
    reason: str
    is_test: bool = False

    @property
    def runs_ahead(self) -> bool:
        return self.started > self.needed


@dataclass(frozen=True, slots=True)
class AheadOutcome:
    """The outcome of a batch.

    ``returned``: tokens of the returned trajectories, ``stale`` of them from older weights. ``generated``: tokens that
    were generated in this batch, without tokens that replace unusable tokens of earlier batches. ``seconds``: duration,
    or None if it shows nothing, as in a paused batch. ``alone``: seconds until each returned group would be complete in
    the batch alone, or empty if not known.
    """

    returned: int
    stale: int
    generated: int
    seconds: float | None
    alone: Sequence[float]


def choose_ahead(
    limits: AutoLimits,
    state: AheadState,
    needed: int,
    offered: int,
) -> AheadChoice:
    """Choose how many of the ``offered`` prompts run in a batch that ends with ``needed`` complete groups."""
    extra = 0
    if limits.most_stale > 0 and offered > needed:
        extra = round(state.share * (offered - needed))
    started = min(needed, offered) + extra
    relative_time = state.relative_time
    why = ""
    is_test = False
    if extra and (1 - state.ending_last) * offered < needed:
        # Too few groups end before the last groups, so the batch would have to wait for the last groups anyway.
        started = needed
        why = f"; {state.ending_last:.0%} of the groups end together, so that running ahead saves nothing"
    elif extra and relative_time is not None:
        margin = 0.0 if state.prefers_ahead else MARGIN
        prefers_ahead = relative_time < 1 - margin
        is_test = _should_test_slower(limits, state, relative_time, prefers_ahead)
        why = f"; running ahead takes {relative_time:.2f} of the time"
        if is_test:
            why += ", tested"
        # A test runs the kind that is not preferred.
        runs_ahead = prefers_ahead != is_test
        if not runs_ahead:
            started = needed
    reason = f"{started} of {offered} prompts run, and the first {needed} groups are returned{why}"
    return AheadChoice(needed, offered, started, reason, is_test)


def _should_test_slower(
    limits: AutoLimits,
    state: AheadState,
    relative_time: float,
    prefers_ahead: bool,
) -> bool:
    # A test that has begun goes on.
    if state.tested % TEST_BATCHES:
        return True
    # The time without running ahead is only estimated, and may be shorter than running ahead.
    if prefers_ahead and not state.alone and relative_time > CLEARLY_FASTER:
        return True
    slower_measured = state.alone if prefers_ahead else state.ahead
    last_measured = 0
    if slower_measured:
        last_measured, _ = slower_measured[-1]
    is_near = 1 / NEARLY_EQUAL < relative_time < NEARLY_EQUAL
    is_old = state.batches - last_measured >= MAX_BATCHES_UNMEASURED
    is_allowed = state.tested + TEST_BATCHES <= limits.exploration * (state.batches + 1)
    return is_allowed and (is_near or is_old)


def learn_ahead(
    limits: AutoLimits,
    state: AheadState,
    choice: AheadChoice,
    outcome: AheadOutcome,
) -> AheadState:
    could_run_ahead = round(state.share * (choice.offered - choice.needed)) > 0
    has_changed = state.ran_ahead != choice.runs_ahead
    state = replace(
        state,
        batches=min(state.batches + 1, LARGEST),
        tested=min(state.tested + choice.is_test, LARGEST),
        ran_ahead=choice.runs_ahead,
    )
    if could_run_ahead and not choice.is_test:
        state = replace(state, prefers_ahead=choice.runs_ahead)
    if not outcome.returned:
        return state

    # Keep the share of stale tokens at the user's limit on average. A batch that ran only the needed prompts by choice
    # says nothing about it. A share that is too small for an extra prompt must grow again.
    if choice.runs_ahead or not could_run_ahead:
        factor = MAX_CHANGE
        if outcome.stale:
            allowed_stale = limits.most_stale * outcome.returned
            factor = min(max(allowed_stale / outcome.stale, MIN_CHANGE), MAX_CHANGE)
        state = replace(state, share=min(max(state.share * factor, MIN_SHARE_AHEAD), 1.0))
    group_seconds_alone = outcome.alone
    if not group_seconds_alone:
        return state

    alone_seconds = max(group_seconds_alone)
    last_begins_at = (1 - ENDING_LAST_SHARE) * alone_seconds
    num_ending_last = sum(seconds >= last_begins_at for seconds in group_seconds_alone)
    state = replace(state, ending_last=(state.ending_last + num_ending_last / len(group_seconds_alone)) / 2)

    # After a change, the batch resumes what the other kind has carried over, so its time is not typical.
    if has_changed or not outcome.seconds or outcome.generated <= 0:
        return state
    # A batch that runs ahead returns tokens that earlier batches have generated, so the times per token are compared.
    seconds_per_token = outcome.seconds / outcome.generated
    alone_seconds_per_token = alone_seconds / outcome.returned
    relative_time = min(max(seconds_per_token / alone_seconds_per_token, 1 / MAX_RELATIVE_TIME), MAX_RELATIVE_TIME)
    measured = (state.batches, relative_time)
    if choice.runs_ahead:
        return replace(state, ahead=(*state.ahead, measured)[-MAX_KEPT_BATCHES:])
    return replace(state, alone=(*state.alone, measured)[-MAX_KEPT_BATCHES:])
