from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.auto.options import RULES, AutoLimits, build_auto
from darts_server.policy.deadline import Deadline
from darts_server.policy.latency import LatencyCurve
from darts_server.policy.shaping import Shaping
from darts_server.policy.simulation.batch import Batch, BatchPlan
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.policy.simulation.forecast import (
    MAX_SAMPLES,
    MIN_SAMPLES,
    Expectation,
    Forecast,
    forecast,
    limit_of,
)

MACHINE = Machine(StepTime(LatencyCurve((1.0, 64.0), (0.01, 0.02), 1e-4)))
RATIOS = np.exp(np.linspace(-1, 2, 200))
OPTIONS = {
    option.name: option for option in build_auto(Shaping(), Deadline(exploration=0.0), AutoLimits(allow=RULES)).options
}


def of(name: str, batches: Sequence[Batch], limit: int | None = None) -> Forecast:
    option = OPTIONS[name] if limit is None else OPTIONS[name].at(limit)
    return forecast(BatchPlan.of(option.shaping, 8, [None] * batches[0].groups), batches, MACHINE)


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


def test_saturated_prompts_do_not_wait_for_a_tail() -> None:
    plan = BatchPlan.of(Shaping(adaptive=True, redundancy=2.0, max_redundancy=2.0), 8, [None] * 32)
    batches = Expectation([100.0] * 32, [None] * 32, RATIOS).sample(16, rng())
    assert all(plan.saturated)
    with_tail = forecast(replace(plan, saturated=[False] * 32), batches, MACHINE)
    assert forecast(plan, batches, MACHINE).seconds < with_tail.seconds
