from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.auto.options import RULES, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.shaping import BudgetKind, Shaping
from darts_server.policy.simulation.batch import Batch, BatchPlan, Floats
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.policy.simulation.forecast import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    Expectation,
    Forecast,
    forecast,
    limit_of,
    predict_seconds,
)

MACHINE = Machine(StepTime(LatencyCurve((1.0, 64.0), (0.01, 0.02), 1e-4)))
RATIOS = np.exp(np.linspace(-1, 2, 200))
OPTIONS = {
    option.name: option for option in build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=RULES)).options
}


def of(name: str, batches: Sequence[Batch], limit: int | None = None, enough: int | None = None) -> Forecast:
    option = OPTIONS[name] if limit is None else OPTIONS[name].at(limit)
    return forecast(BatchPlan.of(option.shaping, 8, [None] * batches[0].groups, enough=enough), batches, MACHINE)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize(("groups", "samples"), [(8, MAX_SAMPLES), (40, 7), (80, 4), (120, 3), (2000, MIN_SAMPLES)])
def test_small_batches_are_sampled_more_often(groups: int, samples: int) -> None:
    expected = Expectation([100.0] * groups, [None] * groups, RATIOS)
    batches = expected.sample(8, rng())
    assert len(expected.sample(8, rng(), most=1)) == expected.samples(1) == 1
    assert len(batches) == samples
    assert batches[0].lengths.shape == (groups, 8)


def test_lengths_have_their_prompts_mean_and_end_at_the_limit() -> None:
    ratios = RATIOS / RATIOS.mean()
    [batch, *_] = Expectation([10.0] * 20 + [1000.0] * 20, [None] * 40, ratios, max_tokens=3000).sample(200, rng())
    assert batch.lengths[:20].mean() == pytest.approx(10.0, rel=0.1)
    assert batch.lengths.max() == 3000
    assert not batch.valid.all()
    [unlimited, *_] = Expectation([1e15], [None], ratios).sample(2, rng())
    assert unlimited.lengths.max() == 1 << 24


def test_new_prompts_are_expected_to_be_like_recent_ones() -> None:
    found = Expectation.of([5.0, *[None] * 6], [None] * 7, RATIOS, (10.0, 20.0, 30.0), rng(), max_tokens=77)
    assert found is not None
    assert found.means[0] == 5.0
    assert sorted(found.means[1:]) == [10.0, 10.0, 20.0, 20.0, 30.0, 30.0]
    assert found.max_tokens == 77
    known = Expectation.of([5.0, 6.0], [1.0, None], RATIOS, (), rng())
    assert known is not None
    assert known.means == [5.0, 6.0]


def test_nothing_is_expected_of_new_prompts_before_any_were_measured() -> None:
    assert Expectation.of([None], [None], RATIOS, (), rng()) is None
    assert Expectation.of([5.0], [None], None, (), rng()) is None


def test_some_prompts_stand_for_a_large_batch() -> None:
    means = [float(mean) for mean in np.random.default_rng(0).permutation(100)]
    whole = Expectation(means, [2 * mean for mean in means], RATIOS)
    some = whole.thinned(20)
    assert sorted(some.means) == [2.0 + 5 * place for place in range(20)]
    assert some.stds == [2 * mean for mean in some.means]
    assert some.means == [mean for mean in means if mean in some.means]  # in order of arrival
    assert whole.thinned(100) is whole.thinned(101) is whole


@pytest.mark.parametrize(
    "machine",
    [
        replace(MACHINE, max_num_seqs=300),
        pytest.param(replace(MACHINE, kv_blocks=1_500, replicas=2), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("name", ["off", "uniform 1.5", "cut 1.5 at 0.8"])
def test_a_scale_model_takes_about_as_long(name: str, machine: Machine) -> None:
    whole = Expectation([100.0] * 512, [None] * 512, RATIOS, max_tokens=500)
    some = whole.thinned(128)
    shaping = OPTIONS[name].shaping
    expected = forecast(BatchPlan.of(shaping, 8, whole.stds), whole.sample(12, rng()), machine)
    found = forecast(BatchPlan.of(shaping, 8, some.stds), some.sample(12, rng()), machine.scaled(4))
    assert found.seconds == pytest.approx(expected.seconds, rel=0.05)
    assert found.mean_length == pytest.approx(expected.mean_length, rel=0.05)


@pytest.mark.parametrize("servers", [2, 8])
def test_engines_that_share_a_batch_are_one_with_the_places_of_all(servers: int) -> None:
    whole, engine = Expectation([100.0] * 256, [None] * 256, RATIOS, max_tokens=500), replace(MACHINE, max_num_seqs=40)
    plan, batches = BatchPlan.of(OPTIONS["uniform 1.5"].shaping, 8, whole.stds), whole.sample(12, rng())
    divided = forecast(plan, batches, replace(engine, replicas=servers))
    assert forecast(plan, batches, engine.scaled(1 / servers)).seconds == pytest.approx(divided.seconds, rel=0.05)


def test_off_wastes_and_cuts_nothing_and_others_do() -> None:
    expectation = Expectation([100.0] * 32, [None] * 32, RATIOS, max_tokens=600)
    batches = expectation.sample(16, rng())
    found = {name: of(name, batches) for name in OPTIONS}
    off = found["off"]
    assert off.generated == off.returned
    assert (off.cut, off.lost) == (0.0, 0.0)
    assert off.mean_length == pytest.approx(off.returned / (32 * 8))
    cap, cut, uniform = found["cap at 0.8"], found["cut 1.5 at 0.8"], found["uniform 1.5"]
    assert cap.seconds < off.seconds
    assert cut.seconds < off.seconds
    assert 0 < cap.lost < cap.cut  # some of those that are cut would have been truncated
    assert uniform.cut == 0.0
    assert uniform.generated > uniform.returned
    assert uniform.mean_length < off.mean_length


def test_a_batch_that_ends_with_enough_groups_is_shorter() -> None:
    expectation = Expectation([100.0] * 32, [None] * 32, RATIOS)
    batches = expectation.sample(8, rng())
    assert of("off", batches, enough=24).seconds < of("off", batches).seconds


def test_a_limit_cuts_its_share_of_those_that_end() -> None:
    batches = Expectation([100.0] * 64, [None] * 64, RATIOS, max_tokens=600).sample(8, rng())
    lengths, valid = np.concatenate([b.lengths for b in batches]), np.concatenate([b.valid for b in batches])
    for share in (0.02, 0.1):
        limit = limit_of(share, batches)
        assert share - 0.01 < float((lengths > limit)[valid].mean()) <= share
        found = of(f"limit {share}", batches, limit)
        assert found.lost == pytest.approx(share, abs=0.01)
    few = Expectation([1e4] * 64, [None] * 64, np.geomspace(0.05, 20, 200), max_tokens=1200).sample(8, rng())
    lengths, valid = np.concatenate([b.lengths for b in few]), np.concatenate([b.valid for b in few])
    assert 0.1 < valid.mean() < 0.2
    limit = limit_of(0.2, few)
    assert float((lengths > limit)[valid].mean()) == pytest.approx(0.2, abs=0.02)
    assert of("limit 0.2", few, limit).lost == pytest.approx(0.2, abs=0.02)
    none = Expectation([1e6] * 8, [None] * 8, RATIOS, max_tokens=600).sample(8, rng())
    assert limit_of(0.1, none) == 600
    some = Expectation([100.0] * 8, [None] * 8, RATIOS).sample(8, rng())
    shortest = min(int(batch.lengths.min()) for batch in some)
    assert limit_of(1.0, some) == limit_of(5.2, some) == shortest


# --- seconds that are predicted for a mean number of candidates ---------------

SIZE, HIGH = 8, 16
GPU = LatencyCurve((1.0, 128.0, 256.0), (0.02, 0.02, 0.04), 0.0002)
ENGINE = Machine(StepTime(GPU), max_num_seqs=1 << 20)
EXPONENTIAL = -np.log(1 - (np.arange(4000) + 0.5) / 4000)
NARROW, WIDE = (np.random.default_rng(0).lognormal(-(std**2) / 2, std, 2000) for std in (0.2, 0.5))


def prompts(count: int, ratios: Floats = WIDE) -> Expectation:
    return Expectation([300.0] * count, [None] * count, ratios)


def budgeted(most: float = HIGH / SIZE) -> Shaping:
    return Shaping(budget=BudgetKind.CV_LOG, redundancy=1.0, max_redundancy=most)


def predicted(shaping: Shaping, mean: float = 12, size: int = SIZE) -> float:
    return predict_seconds(mean, shaping, size, prompts(32), ENGINE, rng())


def test_what_prunes_is_forecast_as_its_choice_by_length() -> None:
    pruning = replace(budgeted(), pruning=Pruning(), refill=True)
    for shaping in (pruning, replace(pruning, sample_survivors=True)):
        assert predicted(shaping) == predicted(budgeted())


def test_a_group_of_one_has_no_tail() -> None:
    assert predicted(budgeted(), 1, 1) > predicted(budgeted(), 2, 1) > 0


def test_a_batch_is_predicted_with_any_mean_that_is_wanted() -> None:
    batches = prompts(32).sample(HIGH, rng())
    for wanted, used in ((11.5, 11.5), (1, SIZE), (99, HIGH)):
        plan = BatchPlan.of(budgeted(), SIZE, [None] * 32, used)
        assert predicted(budgeted(), wanted) == forecast(plan, batches, ENGINE).seconds


@pytest.mark.parametrize("places", [16, 40, 64, 300])
def test_a_large_batch_takes_as_long_as_all_of_it(places: int) -> None:
    """Of 2,000 prompts 256 are simulated: a place stands for 8 sequences, so that 64 are 8, and 300 not 38."""
    expectation, machine = prompts(2000, NARROW), Machine(StepTime(GPU), max_num_seqs=places)
    plan = BatchPlan.of(budgeted(), SIZE, expectation.stds, 12)
    whole = forecast(plan, expectation.sample(12, rng(), 1), machine)
    found = predict_seconds(12, budgeted(), SIZE, expectation, machine, rng())
    assert found == pytest.approx(whole.seconds, rel=0.03)


def test_a_large_batch_of_large_groups_keeps_its_deadline() -> None:
    wide, machine = replace(budgeted(most=150.0), deadline=Deadline()), Machine(StepTime(LatencyCurve((1.0,), (0.02,))))
    cut, whole = (
        predict_seconds(12, shaping, SIZE, prompts(64, EXPONENTIAL), replace(machine, max_num_seqs=1 << 20), rng())
        for shaping in (wide, replace(wide, deadline=None))
    )
    assert cut < 0.8 * whole
