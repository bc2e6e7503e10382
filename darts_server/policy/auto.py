"""`auto`: how many prompts of a batch run at once, where the prompts that are left over go on in the next batch.

A batch that resumes prompts needs some groups and offers more prompts than these. Running more prompts than are needed
keeps the engine full while the longest answers end, and loses nothing. Its price is tokens of older weights, and larger
batches, which bring nothing where answers are about equally long.

Time is measured relative to the batch alone: the seconds that the returned trajectories would take if all of them
started together and nothing else ran (`LatencyCurve.completion_seconds`). So batches with long answers can be compared
with batches of short ones. In a batch alone, many answers that end at the length limit together are decoded together.
They leave the engine as full as it was, so they are no stragglers. A few long answers are: they leave it nearly empty.
Where so many groups end together with the last one that the needed groups are not complete before, running ahead saves
nothing. Then nothing runs ahead, whatever was measured.

The first batches run ahead. If they are not clearly faster than the batch alone, `auto` also measures batches that run
what they need, and goes on with the faster of both. See `choose_ahead` and `learn_ahead`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median

from darts_server.estimates.checks import LARGEST, check_count, check_length, check_number

MIN_AHEAD = 3
"""Batches that run ahead and are measured before fewer prompts may run. One batch says little, and the first batches
have not yet carried over as many long prompts as later ones."""
CLEAR = 0.8
"""Relative time below which batches that run ahead are kept without measuring what is needed alone: the batch alone is
estimated more exactly than that."""
MARGIN = 0.03
"""Share by which running ahead must be faster if it did not run last. Near the edge the choice must not go back and
forth. Also the share of a batch's time before its end in which a group counts as one that ends last."""
NEAR = 1.1
"""Factor between both times below which the slower one is worth a test now and then."""
LONGEST_UNMEASURED = 256
"""Batches after which the slower one is worth a test in any case."""
TEST_BATCHES = 2
"""Batches of a test. The first one only changes what is carried over, and the second one is measured."""
KEPT = 5
"""Newest measured batches of each kind that count. Their median ignores a batch that was delayed by something else."""
LEAST_CHANGE = 0.5
MOST_CHANGE = 1.25
"""Factors by which the share of prompts that run ahead may change from one batch to the next."""
FEWEST_AHEAD = 1 / 64
"""Least share of the prompts that are not needed: if none ran ahead, nothing would be learned any more."""
LONGEST = 150.0
"""Largest relative time that is accepted."""

Measured = tuple[int, float]
"""Number of a batch, and its relative time."""


@dataclass(frozen=True, slots=True)
class AutoLimits:
    """Limits that the user sets for `auto`.

    ``most_stale``: largest share of returned tokens that older weights have generated, on average over batches.
    ``exploration``: largest share of batches that test what is expected to be slower.
    """

    most_stale: float = 0.5
    exploration: float = 0.05


@dataclass(frozen=True, slots=True)
class AheadState:
    """What batches have taught about running ahead. Plain fields: ``AheadState(**json)`` restores it.

    ``batches``: number of batches that have ended. ``tested``: number of these that belonged to a test. ``share``: part
    of the prompts that are not needed that may run ahead. ``prefers_ahead``: whether the last batch outside of a test
    ran ahead, if it could. ``ran_ahead``: whether the last batch ran ahead. ``ahead``, ``alone``: newest measured
    batches that ran ahead, and that ran what they needed, oldest first. ``ending_last``: share of a batch's groups that
    end together with its last one. Each batch counts half as much as the next.
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
            check_length(name, measured, KEPT)
            for batch, time in measured:
                check_count(name, batch)
                check_number(name, time, 1 / LONGEST, LONGEST)
                if batch > self.batches:
                    raise ValueError(f"{name} must be of the {self.batches} batches that have ended, got {batch}")
            object.__setattr__(self, name, tuple((batch, time) for batch, time in measured))

    @property
    def relative_time(self) -> float | None:
        """Time of a batch that runs ahead, relative to a batch that runs what it needs.

        It is estimated while no batch of the latter kind was measured, and ``None`` until `MIN_AHEAD` were measured of
        the former.
        """
        if len(self.ahead) < MIN_AHEAD:
            return None
        ahead = median(time for _, time in self.ahead)
        alone = 1.0
        if self.alone:
            alone = median(time for _, time in self.alone)
        return ahead / alone


@dataclass(frozen=True, slots=True)
class AheadChoice:
    """How many prompts of a batch run at once, ``begun``, of those that are ``offered``.

    ``needed``: complete groups with which the batch ends. ``reason``: the choice in words. ``is_test``: whether the
    other kind of batch was expected to be faster.
    """

    needed: int
    offered: int
    begun: int
    reason: str
    is_test: bool = False

    @property
    def runs_ahead(self) -> bool:
        return self.begun > self.needed


@dataclass(frozen=True, slots=True)
class AheadOutcome:
    """How a batch went.

    ``returned``, ``stale``: tokens of the returned trajectories, and those of them that older weights have generated.
    ``generated``: tokens that candidates have generated in this batch, without those that replace tokens of earlier
    batches that could not be used. ``seconds``: ``None`` if they say nothing, as in a batch that was paused.
    ``alone``: seconds after which each returned group is complete in the batch alone, see above; empty if they are not
    known.
    """

    returned: int
    stale: int
    generated: int
    seconds: float | None
    alone: Sequence[float]


def choose_ahead(limits: AutoLimits, state: AheadState, needed: int, offered: int) -> AheadChoice:
    """Choose how many of the ``offered`` prompts run in a batch that ends with ``needed`` complete groups."""
    more = 0
    if limits.most_stale > 0 and offered > needed:
        more = round(state.share * (offered - needed))
    begun = min(needed, offered) + more
    relative = state.relative_time
    why = ""
    is_test = False
    if more and (1 - state.ending_last) * offered < needed:
        begun = needed
        why = f"; {state.ending_last:.0%} of the groups end together, so that running ahead saves nothing"
    elif more and relative is not None:
        margin = 0.0 if state.prefers_ahead else MARGIN
        prefers_ahead = relative < 1 - margin
        is_test = _is_test(limits, state, relative, prefers_ahead)
        why = f"; running ahead takes {relative:.2f} of the time"
        if is_test:
            why += ", tested"
        if prefers_ahead == is_test:
            begun = needed
    reason = f"{begun} of {offered} prompts run, and the first {needed} groups are returned{why}"
    return AheadChoice(needed, offered, begun, reason, is_test)


def _is_test(limits: AutoLimits, state: AheadState, relative: float, prefers_ahead: bool) -> bool:
    """Return whether the batch runs in the way that is expected to be slower."""
    if state.tested % TEST_BATCHES:
        return True
    if prefers_ahead and not state.alone and relative > CLEAR:
        return True
    other = state.alone if prefers_ahead else state.ahead
    last = other[-1][0] if other else 0
    is_near = 1 / NEAR < relative < NEAR
    is_old = state.batches - last >= LONGEST_UNMEASURED
    is_allowed = state.tested + TEST_BATCHES <= limits.exploration * (state.batches + 1)
    return is_allowed and (is_near or is_old)


def learn_ahead(limits: AutoLimits, state: AheadState, choice: AheadChoice, outcome: AheadOutcome) -> AheadState:
    """Learn from a batch that has ended.

    ``share`` follows the share of stale tokens, so that this stays at the user's limit on average over batches. All
    prompts run ahead at first.
    """
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
    # A batch that ran what it needs says nothing about the stale tokens of more.
    if choice.runs_ahead or not could_run_ahead:
        factor = MOST_CHANGE
        if outcome.stale:
            factor = min(max(limits.most_stale * outcome.returned / outcome.stale, LEAST_CHANGE), MOST_CHANGE)
        state = replace(state, share=min(max(state.share * factor, FEWEST_AHEAD), 1.0))
    if not outcome.alone:
        return state
    alone_seconds = max(outcome.alone)
    last = sum(seconds >= (1 - MARGIN) * alone_seconds for seconds in outcome.alone)
    state = replace(state, ending_last=(state.ending_last + last / len(outcome.alone)) / 2)
    # After a change the batch goes on from what the other kind has carried over, which makes it quicker or slower.
    if has_changed or not outcome.seconds or outcome.generated <= 0:
        return state
    # Batches return tokens that others have generated, so time is compared per token.
    time = (outcome.seconds / outcome.generated) / (alone_seconds / outcome.returned)
    measured = state.batches, exp(min(max(log(time), -log(LONGEST)), log(LONGEST)))
    if choice.runs_ahead:
        return replace(state, ahead=(*state.ahead, measured)[-KEPT:])
    return replace(state, alone=(*state.alone, measured)[-KEPT:])
