"""`auto` runs prompts ahead while that is faster, and keeps stale tokens below the user's limit."""

import json
from dataclasses import asdict, dataclass, field, replace
from math import exp

import numpy as np
import pytest

from darts_server.estimates.latency import LatencyCurve
from darts_server.policy.auto import (
    MAX_BATCHES_UNMEASURED,
    MAX_KEPT_BATCHES,
    MIN_SHARE_AHEAD,
    AheadChoice,
    AheadOutcome,
    AheadState,
    AutoLimits,
    choose_ahead,
    learn_ahead,
)

NEEDED, OFFERED, TOKENS = 16, 24, 6400
STRAGGLING = [0.5] * 15 + [1.0]
"""Seconds after which each of 16 groups is complete in a batch alone."""
TOGETHER = [1.0] * 16
STATE = AheadState(40, 4, 0.5, True, True, ((38, 0.9), (40, 0.8)), ((37, 1.1),), 0.25)


@dataclass
class Training:
    """Batches that need 16 of 24 groups, one after the other.

    A batch that runs only the needed prompts takes 1 second, and a batch that runs more takes ``ahead`` seconds.
    ``stale``: returned tokens of older weights for each prompt that ran ahead. ``alone``: seconds after which each
    returned group is complete in the batch alone.
    """

    ahead: float
    limits: AutoLimits = field(default_factory=AutoLimits)
    stale: int = 0
    noise: float = 0.0
    offered: int = OFFERED
    alone: list[float] = field(default_factory=lambda: STRAGGLING)
    state: AheadState = field(default_factory=AheadState)
    choices: list[AheadChoice] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def run(self, batches: int) -> str:
        """Return whether each batch ran ahead, as 0 and 1."""
        self.choices.clear()
        for _ in range(batches):
            choice = choose_ahead(self.limits, self.state, NEEDED, self.offered)
            self.choices.append(choice)
            more = choice.started - NEEDED
            seconds = (self.ahead if more else 1.0) * exp(self.noise * self.rng.standard_normal())
            self.state = learn_ahead(
                self.limits, self.state, choice, AheadOutcome(TOKENS, self.stale * more, TOKENS, seconds, self.alone)
            )
        return "".join(str(int(choice.runs_ahead)) for choice in self.choices)


def learned(choice: AheadChoice, outcome: AheadOutcome, state: AheadState | None = None) -> AheadState:
    return learn_ahead(AutoLimits(), state or AheadState(ran_ahead=choice.runs_ahead), choice, outcome)


ALL = AheadChoice(NEEDED, OFFERED, OFFERED, "")
NO_MORE = AheadChoice(NEEDED, OFFERED, NEEDED, "")
OUTCOME = AheadOutcome(TOKENS, 0, TOKENS, 2.0, [1.0, 1.0, 4.0])


def test_all_prompts_run_from_the_first_batch_on() -> None:
    training = Training(ahead=0.5)
    assert training.run(6) == "111111"
    assert {choice.started for choice in training.choices} == {OFFERED}
    assert training.choices[-1].reason == "24 of 24 prompts run, and the first 16 groups are returned"
    assert training.run(100) == 100 * "1", "this is clearly faster than what is needed alone"
    assert training.choices[0].reason.endswith("; running ahead takes 0.50 of the time")


@pytest.mark.parametrize("ahead", [0.9, 1.1])
def test_batches_that_are_not_clearly_faster_are_compared_with_measured_batches(ahead: float) -> None:
    training = Training(ahead)
    assert training.run(8) == "11111100", "only the second batch of a test is measured"
    assert training.choices[-1].reason.endswith(", tested") == (ahead < 1)
    assert training.state.alone == ((8, 1.0),)
    assert training.run(5) == 5 * str(int(ahead < 1))


@pytest.mark.parametrize("ahead", [0.45, 0.7, 0.9, 1.08, 1.2, 2.0])
def test_the_faster_kind_of_batch_runs_except_in_tests(ahead: float) -> None:
    training = Training(ahead, noise=0.02)
    training.run(6)
    assert training.run(60).count("0" if ahead < 1 else "1") <= 4


def test_a_kind_that_is_nearly_as_fast_is_tested_again_in_two_batches() -> None:
    training = Training(1.05, AutoLimits(exploration=0.1), noise=0.02)
    training.run(10)
    tested = training.run(60)
    assert tested == "".join(str(int(choice.is_test)) for choice in training.choices)
    assert set(tested.rstrip("1").replace("0", " ").split()) == {"11"}
    assert 0 < tested.count("1") <= 0.1 * 70
    assert training.state.ahead[-1][0] > 10


def test_a_kind_that_is_much_slower_is_tested_only_after_many_batches() -> None:
    training = Training(1.5)
    training.run(10)
    tested = training.run(2 * MAX_BATCHES_UNMEASURED)
    assert 0 < tested.count("1") <= 4
    assert training.run(3) == "000", "with the same result"


def test_without_exploration_nothing_is_tested_again() -> None:
    training = Training(1.2, AutoLimits(exploration=0.0))
    assert training.run(400) == "111111" + 394 * "0"


def test_near_the_edge_the_choice_does_not_go_back_and_forth() -> None:
    measured = replace(STATE, tested=0, ahead=tuple((batch, 0.98) for batch in range(1, 6)), alone=((6, 1.0),))
    limits = AutoLimits(exploration=0.0)
    assert choose_ahead(limits, measured, NEEDED, OFFERED).runs_ahead
    assert not choose_ahead(limits, replace(measured, prefers_ahead=False), NEEDED, OFFERED).runs_ahead


@pytest.mark.parametrize("ahead", [0.7, 0.97, 1.03])
def test_no_prompt_runs_ahead_if_groups_end_together_whatever_was_measured(ahead: float) -> None:
    training = Training(ahead, noise=0.03, alone=TOGETHER)
    assert training.run(60) == "1" + 59 * "0"
    assert training.choices[-1].reason == (
        "16 of 24 prompts run, and the first 16 groups are returned; "
        "100% of the groups end together, so that running ahead saves nothing"
    )
    assert not any(choice.is_test for choice in training.choices)
    training.alone = STRAGGLING
    training.run(4)
    assert training.run(2) == "11"


@pytest.mark.parametrize(("last", "ahead"), [(5, "1"), (6, "0")])
def test_groups_that_end_last_are_stragglers_if_enough_other_groups_are_complete_before(last: int, ahead: str) -> None:
    """Of 24 running groups, 16 are needed, so at most a third may end last."""
    training = Training(0.5, alone=[0.5] * (16 - last) + [0.98] * (last - 1) + [1.0])
    training.run(12)
    assert training.run(4) == 4 * ahead


def test_a_batch_without_known_times_alone_shows_no_stragglers() -> None:
    state = replace(STATE, ending_last=0.5)
    assert learned(ALL, replace(OUTCOME, alone=()), state).ending_last == 0.5
    assert learned(ALL, OUTCOME, state).ending_last == pytest.approx((0.5 + 1 / 3) / 2)


def test_one_delayed_batch_changes_no_choice() -> None:
    training = Training(0.9)
    training.run(20)
    training.ahead = 30.0
    training.run(1)
    training.ahead = 0.9
    assert training.run(20) == 20 * "1"


def test_batches_that_cannot_run_ahead_change_no_choice() -> None:
    training = Training(0.97)
    training.run(12)
    training.offered = NEEDED
    assert training.run(3) == "000"
    training.offered = OFFERED
    assert training.run(3) == "111"


def test_the_share_that_runs_ahead_follows_the_share_of_stale_tokens_to_the_limit_and_back() -> None:
    training = Training(0.5, AutoLimits(most_stale=0.25), stale=400)
    training.run(40)
    assert [choice.started for choice in training.choices[-3:]] == [20] * 3
    training.limits = AutoLimits(most_stale=0.01)
    training.run(30)
    assert MIN_SHARE_AHEAD <= training.state.share < 0.2
    training.stale = 0
    training.run(30)
    assert training.state.share == 1.0


def test_batches_that_run_only_needed_prompts_do_not_change_the_share() -> None:
    training = Training(1.3, AutoLimits(most_stale=0.25), stale=400)
    training.run(4)
    share = training.state.share
    training.run(20)
    assert training.state.share == share


def test_no_prompt_runs_ahead_if_no_token_may_be_stale() -> None:
    assert choose_ahead(AutoLimits(most_stale=0.0), AheadState(), NEEDED, OFFERED).started == NEEDED


@pytest.mark.parametrize(("offered", "started"), [(10, 10), (16, 16), (24, 20)])
def test_no_more_prompts_run_than_are_offered(offered: int, started: int) -> None:
    choice = choose_ahead(AutoLimits(), AheadState(share=0.5), NEEDED, offered)
    assert (choice.started, choice.needed, choice.offered) == (started, NEEDED, offered)


def test_time_is_compared_per_generated_token_with_the_returned_tokens_alone() -> None:
    [(batch, time)] = learned(ALL, OUTCOME).ahead
    assert batch == 1
    assert time == pytest.approx(0.5)
    [(batch, time)] = learned(ALL, replace(OUTCOME, generated=2 * TOKENS)).ahead
    assert batch == 1
    assert time == pytest.approx(0.25)
    [(batch, time)] = learned(NO_MORE, OUTCOME).alone
    assert batch == 1
    assert time == pytest.approx(0.5)


def test_answers_that_end_together_at_their_length_limit_are_no_stragglers() -> None:
    """Three batches have equal tokens and seconds. Running ahead helps most if a few answers are much longer."""
    curve = LatencyCurve((1.0, 64.0), (1.0, 8.0), 0.1)
    times = {}
    for name, lengths in {
        "even": [100] * 64,
        "truncated": [60] * 32 + [140] * 32,
        "straggler": [60] * 62 + [1340] * 2,
    }.items():
        outcome = AheadOutcome(TOKENS, 0, TOKENS, 800.0, curve.completion_seconds(lengths).tolist())
        [(_, times[name])] = learned(ALL, outcome).ahead
    assert times["even"] == pytest.approx(1.0)
    assert times["truncated"] > 0.9, "half of the engine is full until the limit"
    assert times["straggler"] < 0.5


@pytest.mark.parametrize(
    "outcome",
    [
        replace(OUTCOME, returned=0),
        replace(OUTCOME, seconds=None),
        replace(OUTCOME, alone=()),
        replace(OUTCOME, generated=0),
        replace(OUTCOME, generated=-5),
    ],
)
def test_batches_without_times_are_counted_and_not_measured(outcome: AheadOutcome) -> None:
    state = learned(ALL, outcome)
    assert (state.batches, state.ahead) == (1, ())


def test_the_first_batch_after_a_change_is_not_measured() -> None:
    assert learned(ALL, OUTCOME, AheadState(ran_ahead=False)).ahead == ()
    assert learned(NO_MORE, OUTCOME, AheadState(ran_ahead=True)).alone == ()


def test_only_the_newest_measured_batches_are_kept() -> None:
    training = Training(0.5)
    training.run(20)
    assert [batch for batch, _ in training.state.ahead] == [*range(21 - MAX_KEPT_BATCHES, 21)]


def test_extreme_times_are_kept_within_limits() -> None:
    for seconds in (1e-300, 1e300):
        state = learned(ALL, replace(OUTCOME, seconds=seconds))
        assert AheadState(**asdict(state)) == state


def test_the_state_survives_json() -> None:
    assert AheadState(**json.loads(json.dumps(asdict(STATE)))) == STATE


@pytest.mark.parametrize(
    "changed",
    [
        {"batches": -1},
        {"tested": 0.5},
        {"share": 1.5},
        {"ending_last": -0.1},
        {"prefers_ahead": "yes"},
        {"ran_ahead": 1},
        {"ahead": [[1, 1.0]] * (MAX_KEPT_BATCHES + 1)},
        {"ahead": [[1, 0.0]]},
        {"alone": [[41, 1.0]]},
        {"alone": [[1.5, 1.0]]},
        {"alone": [1.0]},
        {"means": []},
    ],
)
def test_an_impossible_state_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        AheadState(**{**asdict(STATE), **changed})
