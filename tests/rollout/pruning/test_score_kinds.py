import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.rollout.pruning.score_kinds import LOWEST_WINDOW, ScoreKind, logprob_score


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=2 * LOWEST_WINDOW))
def test_scores_are_exponentials_of_the_mean_and_of_the_lowest_mean_of_a_window(logprobs: list[float]) -> None:
    width = min(LOWEST_WINDOW, len(logprobs))
    windows = [statistics.fmean(logprobs[i : i + width]) for i in range(len(logprobs) - width + 1)]
    mean, lowest = (logprob_score(kind, tuple(logprobs)) for kind in (ScoreKind.LOGPROB, ScoreKind.LOWEST_LOGPROB))
    assert mean == pytest.approx(math.exp(statistics.fmean(logprobs)))
    assert lowest == pytest.approx(math.exp(min(windows)))


@pytest.mark.parametrize("logprobs", [(), (-1.0, math.nan), (-1.0, -math.inf)])
def test_without_finite_log_probs_there_is_no_score(logprobs: tuple[float, ...]) -> None:
    assert logprob_score(ScoreKind.LOGPROB, logprobs) is None


def test_log_probs_that_rounding_put_above_0_count_as_0() -> None:
    assert logprob_score(ScoreKind.LOGPROB, (1e-7,)) == 1.0
