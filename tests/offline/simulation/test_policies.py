import pytest

from darts_server.exceptions import InvalidSetting
from darts_server.offline.simulation.model.batch import BatchPlan
from darts_server.offline.simulation.policies import DEFAULT, parse_policy, split_policies
from darts_server.policy.shaping import Tail


@pytest.mark.parametrize("text", DEFAULT)
def test_the_default_policies_plan_a_batch(text: str) -> None:
    policy = parse_policy(text, 8)
    plan = BatchPlan.of(policy.shaping, 8, [10.0, 20.0, None, 400.0])
    assert max(plan.candidates) <= policy.max_candidates(8)
    assert min(plan.candidates) >= 8


def test_several_policies_may_be_named_at_once() -> None:
    texts = ["off,uniform,darts_cut,quantile=0.8,start=1.25", "cap", "darts,uniform"]
    assert split_policies(texts) == ["off", "uniform", "darts_cut,quantile=0.8,start=1.25", "cap", "darts", "uniform"]
    assert split_policies(["=1"]) == ["=1"]


def test_options_change_a_policy() -> None:
    policy = parse_policy("darts_cut,redundancy=1.25,longest=2,quantile=0.8,adaptive=no,start=1.5", 8)
    assert policy.shaping is not None
    assert policy.shaping.deadline is not None
    assert (policy.shaping.redundancy, policy.shaping.num_longest, policy.shaping.adaptive) == (1.25, 2, False)
    assert (policy.shaping.deadline.quantile, policy.shaping.deadline.cut_factor, policy.start) == (0.8, 2, 1.5)
    tail = parse_policy("uniform,tail=longest", 8).shaping
    assert tail is not None
    assert tail.tail is Tail.LONGEST


def test_auto_has_options_for_prompts_ahead_and_stale_tokens() -> None:
    auto = parse_policy("auto,stale=0.25", 8)
    assert auto.shaping is None
    assert (auto.start, auto.resumes, auto.long_first, auto.most_stale) == (1.5, True, True, 0.25)
    assert parse_policy("auto", 8).most_stale == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "there is no 'fast'; choose from off, uniform"),
        ("uniform,speed=2", "unknown option 'speed'; choose from redundancy"),
        ("uniform,redundancy=no", "redundancy must be a number from 1 to 8"),
        ("uniform,longest=8", "longest must be a number from 0 to 7"),
        ("uniform,tail=short", "tail must be sampled or longest"),
        ("off,order=short", "order must be given or long"),
        ("auto,stale=2", "stale must be a number from 0 to 1"),
        ("auto,redundancy=2", "unknown option 'redundancy'; choose from start, stale"),
        ("auto,allow=resume", "unknown option 'allow'; choose from start, stale"),
        ("off,redundancy=2", "off has only the options start, carry, rounds, order"),
        ("off,rounds=long", "rounds=long needs start=1.01 or more"),
    ],
)
def test_an_invalid_policy_names_its_error(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        parse_policy(text, 8)


def test_redundancy_auto_gives_more_candidates_if_lengths_of_a_prompt_vary_more() -> None:
    shaping = parse_policy("uniform,redundancy=auto", 8).shaping
    even, spread = (BatchPlan.of(shaping, 8, [std] * 4, mean_length=300.0).candidates for std in (10.0, 300.0))
    assert (list(even), list(spread)) == ([8] * 4, [14] * 4)
    assert list(BatchPlan.of(shaping, 8, [None] * 4).candidates) == [12] * 4
    with pytest.raises(InvalidSetting, match="redundancy must be a number from 1 to 8, or auto"):
        parse_policy("uniform,redundancy=more", 8)
