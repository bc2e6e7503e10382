"""Candidates for requests that come one at a time: as in a cohort, with the mean at its target."""

import json
import math
import statistics
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.policy.allocation.optimum import allocate_by_std
from darts_server.policy.allocation.shadow_price import WINDOW, ShadowPrice, ShadowPriceState
from tests.policy.allocation.test_optimum import HIGH, LOW, TARGET

RNG = np.random.default_rng(0)


STATIONARY = RNG.lognormal(4, 1, 4000).tolist()


DRIFTING = (RNG.lognormal(4, 0.7, 4000) * np.exp(np.linspace(3, -3, 4000))).tolist()


STREAMS = [
    pytest.param(STATIONARY, id="stationary"),
    pytest.param(DRIFTING, id="drifting down"),
    pytest.param(DRIFTING[::-1], id="drifting up"),
    pytest.param(sorted(STATIONARY), id="sorted"),
    pytest.param(sorted(STATIONARY, reverse=True), id="sorted, widest first"),
    pytest.param(sorted(STATIONARY)[::2] + sorted(STATIONARY, reverse=True)[::2], id="up and down"),
    pytest.param(([0.0] * 500 + [1000.0] * 500) * 2, id="blocks"),
    pytest.param([0.0, 1000.0] * 1000, id="by turns"),
    pytest.param([7.0] * 2000, id="constant"),
    pytest.param([float(10 ** (i / 100)) for i in range(2000)], id="exploding"),
    pytest.param([std if i % 3 else None for i, std in enumerate(STATIONARY)], id="a third unseen"),
    pytest.param([None] * 2000, id="all unseen"),
]


@pytest.mark.untraced
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("target", [8, 8.3, 15.5])
def test_the_mean_stays_at_the_target(stream: list[float | None], target: float) -> None:
    price = ShadowPrice(target, LOW, HIGH)
    counts = [price.candidates(std) for std in stream]
    assert statistics.fmean(counts) == pytest.approx(target, rel=0.02)
    assert all(LOW <= m <= HIGH for m in counts)


@pytest.mark.untraced
@pytest.mark.parametrize("target", [8.3, 12, 15.5])
def test_the_mean_is_at_the_target_throughout_the_stream(target: float) -> None:
    price = ShadowPrice(target, LOW, HIGH)
    counts = [price.candidates(std) for std in STATIONARY]
    for begin in range(WINDOW, len(counts), WINDOW):
        assert statistics.fmean(counts[begin : begin + WINDOW]) == pytest.approx(target, rel=0.05)


def test_a_request_gets_what_the_batch_would_give() -> None:
    price = ShadowPrice(TARGET, LOW, HIGH)
    singles = [price.candidates(std) for std in STATIONARY]
    last = STATIONARY[-WINDOW:]
    batch = allocate_by_std(last, budget=round(TARGET * WINDOW), low=LOW, high=HIGH)
    apart = [abs(m - k) for m, k in zip(singles[-WINDOW:], batch, strict=True)]
    assert max(apart) <= 3
    assert statistics.fmean(apart) < 1


@given(st.lists(st.floats(0, 1e6), max_size=30), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_wider_prompt_gets_no_fewer_except_for_its_own_effect_on_the_price(
    before: list[float], one: float, two: float
) -> None:
    counts = []
    for std in sorted([one, two]):
        price = ShadowPrice(TARGET, LOW, HIGH)
        for known in before:
            price.candidates(known)
        counts.append(price.candidates(std))
    assert counts[0] <= counts[1] + 1


def test_a_request_without_std_is_allocated_like_an_average_one() -> None:
    price = ShadowPrice(TARGET, LOW, HIGH, ShadowPriceState(recent=(10.0, 50.0)))
    known = ShadowPrice(TARGET, LOW, HIGH, ShadowPriceState(recent=(10.0, 50.0)))
    assert price.candidates(None) == known.candidates(30.0)
    assert price.state.recent == (10.0, 50.0)


def test_the_state_survives_json_and_continues_unchanged() -> None:
    price = ShadowPrice(TARGET, LOW, HIGH)
    for std in STATIONARY[:300]:
        price.candidates(std)
    restored = ShadowPriceState(**json.loads(json.dumps(asdict(price.state))))
    assert restored == price.state
    twin = ShadowPrice(TARGET, LOW, HIGH, restored)
    assert [twin.candidates(s) for s in STATIONARY[300:500]] == [price.candidates(s) for s in STATIONARY[300:500]]


def test_the_target_can_change_between_requests() -> None:
    price = ShadowPrice(10, LOW, HIGH)
    for std in STATIONARY[:2000]:
        price.candidates(std)
    price = ShadowPrice(14, LOW, HIGH, price.state)
    assert statistics.fmean(price.candidates(std) for std in STATIONARY[2000:]) == pytest.approx(14, rel=0.02)


@pytest.mark.parametrize("target", [7.9, 16.1, math.nan])
def test_a_target_outside_the_bounds_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=r"target must be in \[8, 16\]"):
        ShadowPrice(target, LOW, HIGH)


def test_a_state_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="debt must be a number in"):
        ShadowPriceState(debt=math.nan)
    with pytest.raises(ValueError, match="carry must be a number in"):
        ShadowPriceState(carry=0.5)
