"""Groups under roulette on the scripted engine: what is stopped, and what weights make of it."""

from dataclasses import replace
from math import ceil, exp, fsum, sqrt
from random import Random
from statistics import NormalDist, fmean, stdev

import pytest

from darts_server.engine.scripted import Script
from darts_server.exceptions import InvalidRequest
from darts_server.policy.deadline import Deadline
from darts_server.policy.named_policies import build_policies
from darts_server.policy.pruning.roulette import Loss, PromptForecast, Roulette
from darts_server.policy.pruning.survival import Pruning
from darts_server.policy.reward_stats import Moments, RewardStats
from darts_server.policy.shaping import Shaping
from darts_server.records import Checkpoint, GroupRecord
from darts_server.rollout.allocation.cohort import Allocation
from darts_server.rollout.learned.forecasts import CACHE_SECONDS, PRIOR_TRAJECTORIES, Forecasts
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.pruning.checkpoints import Checkpoints
from darts_server.rollout.spec import GroupSpec
from darts_server.types import DiscardReason
from tests.rollout.helpers import Documents, Harness
from tests.rollout.pruning.fake_scorer import FakeScorer

pytestmark = pytest.mark.anyio
SIZE = 4
PROMPT = "the prompt"


def heavy_tailed(group: str, index: int) -> int:
    return min(400, ceil(3 * exp(1.4 * NormalDist().inv_cdf(Random(f"{group}:{index}").random() or 0.5))))


class Groups:
    """Groups of one prompt, one after the other."""

    def __init__(self, survivors: bool, scorer: FakeScorer | None = None) -> None:
        shapings = build_policies(Shaping(redundancy=2.0), Deadline(), Pruning(), roulette=Roulette(loss=Loss.SEQUENCE))
        if survivors:
            shapings["roulette"] = replace(shapings["roulette"], return_survivors=True)
        self.harness = Harness(lambda group, index: Script(heavy_tailed(group, index)), shapings, scorer=scorer)
        self.plan = self.harness.plan(SIZE, "roulette")
        self.count = 0

    async def run(self) -> GroupRecord:
        name = f"g{self.count}"
        spec = GroupSpec.of_plan(self.plan, name, name, PROMPT, (self.count,))
        self.count += 1
        run = self.harness.rollouts.start(spec, self.plan, Allocation(2 * SIZE))
        await self.harness.group(run)
        return self.harness.record(name)


@pytest.mark.parametrize("survivors", [True, False], ids=["all survivors", "exactly M"])
async def test_weighted_returned_lengths_estimate_those_of_all_candidates_at_fewer_tokens(survivors: bool) -> None:
    groups = Groups(survivors)
    errors, generated, whole, pruned = [], 0, 0, 0
    for number in range(160):
        record = await groups.run()
        true = [heavy_tailed(record.group_id, i) for i in range(2 * SIZE)]
        if number == 0:
            assert all(c.reason is not DiscardReason.PRUNED for c in record.candidates), "nothing is known yet"
        weights = [c.weight for c in record.selected if c.weight is not None]
        assert len(weights) == len(record.selected) == (len(weights) if survivors else SIZE)
        kept = sum(c.reason is not DiscardReason.PRUNED for c in record.candidates)
        assert record.sampled_from == (None if survivors else kept)
        estimate = fsum(w * c.tokens for w, c in zip(weights, record.selected, strict=True))
        errors.append((estimate - sum(true)) / record.counted)
        generated, whole, pruned = generated + record.generated_tokens, whole + sum(true), pruned + 2 * SIZE - kept
        for candidate in record.candidates:
            assert candidate.survival >= 0.1
            assert all(point.value is None and point.tokens <= candidate.tokens for point in candidate.checkpoints)
    assert pruned > 20
    assert generated < 0.95 * whole
    assert abs(fmean(errors)) < 3 * stdev(errors) / sqrt(len(errors))


async def test_roulette_needs_no_scores_and_is_served_where_nothing_can_be_scored() -> None:
    groups = Groups(survivors=True, scorer=FakeScorer(2))
    assert not groups.harness.rollouts.can_score
    assert len((await groups.run()).selected) == 2 * SIZE
    with pytest.raises(InvalidRequest, match="'arrol' prunes by hidden states"):
        groups.harness.plan(SIZE, "arrol")


async def test_where_candidates_can_be_scored_they_are() -> None:
    scorer = FakeScorer(2, uses_hidden_states=False, survival=0.5)
    record = await Groups(survivors=True, scorer=scorer).run()
    scored = [c for c in record.candidates if c.checkpoints]
    assert scored
    for candidate in scored:
        assert candidate.checkpoints == (Checkpoint(2, 0.5, 0.5),)
        assert candidate.weight in (2.0, None)
    kept = {c.index: c.survival for c in record.candidates if c.checkpoints and c.weight is not None}
    assert dict(scorer.kept) == kept


def test_what_is_known_of_a_prompt() -> None:
    now = [0.0]
    documents = Documents()
    statistics = Statistics(documents)
    forecasts = Forecasts(statistics.prompts, statistics.dataset, statistics.rewards, lambda: now[0])
    nothing = (None, None, None)

    def known(key: str | None = PROMPT) -> tuple[float | None, object, float | None]:
        found: PromptForecast = forecasts.of_prompt(key)
        return found.mean_length, found.ratios, found.pass_rate

    assert known(None) == known() == nothing
    documents.put(
        "prompt", PROMPT, {"std_ema": 1.0, "mean_ema": 7.0, "groups": 1, "candidates": 4, "weight_version": 0}
    )
    right, wrong = Moments(6, 5.0, 1.0, 6.0, 6.0), Moments(2, 5.0, 1.0, 2.0, 2.0)
    statistics.rewards.learn({"another": RewardStats(right=wrong, wrong=right)})
    assert known() == (7.0, None, None)
    statistics.rewards.learn({PROMPT: RewardStats(right=right, wrong=wrong)})
    mean, ratios, rate = known()
    assert (mean, ratios) == (7.0, None)
    assert rate == pytest.approx((8 * 0.75 + PRIOR_TRAJECTORIES * 0.5) / (8 + PRIOR_TRAJECTORIES))
    profile = statistics.dataset.profile
    profile.observe([(0.5, False), (1.5, False)])
    documents.put("profile", "all", {"value": f'{{"finished": {list(profile.state.finished)}}}'})
    assert known()[1] is None, "cached"
    now[0] += CACHE_SECONDS
    assert known()[1] is not None


class Running:
    def __init__(self, tokens: int | None) -> None:
        self.count = tokens

    def tokens(self) -> int | None:
        return self.count


def test_of_several_checkpoints_the_last_counts_and_each_counts_once() -> None:
    class Halves:
        checkpoints = (4, 8, 16)

        def at_checkpoint(self, index: int, tokens: int) -> float:
            return 1 / tokens

        def at_score(self, index: int, tokens: int, quality: float | None, recent: object) -> float:
            raise AssertionError

    running = {0: Running(3), 1: Running(9), 2: Running(None)}
    checkpoints = Checkpoints(Halves(), running)  # type: ignore[arg-type]  # only tokens are read
    assert [(s.index, s.quality, s.survival, s.tokens) for s in checkpoints.poll()] == [(1, None, 1 / 8, 8)]
    assert not checkpoints.poll()
    running[0].count, running[1].count = 4, 99
    assert [(s.index, s.tokens) for s in checkpoints.poll()] == [(0, 4), (1, 16)]
    assert not Checkpoints(Pruning(), running).poll()  # type: ignore[arg-type]  # only tokens are read
