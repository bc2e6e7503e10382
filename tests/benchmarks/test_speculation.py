"""Comparisons of answers with drafts find differences and nothing else; tables of training runs, from made-up lines."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.speculation_exact import Answer, difference, prefixes
from benchmarks.speculation_training import Line, Sampled, answers_table, cost_table, within_error

LINE = Line("16 x 8", "off", False, 0, 0, "none", 100, 4.0, 2.0, 0.5, 0.03, 30.0, 0.4)


def answers(seed: int, shares: tuple[float, ...], count: int = 2000) -> list[Answer]:
    """Return answers to two prompts whose tokens have these shares."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(len(shares), size=(count, 3), p=shares)
    return [Answer(number % 2, tuple(row.tolist()), (), float(row[0])) for number, row in enumerate(tokens)]


def test_equal_distributions_have_small_scores() -> None:
    pairs = [(answers(seed, (0.5, 0.3, 0.2)), answers(1000 + seed, (0.5, 0.3, 0.2))) for seed in range(40)]
    for scores in (
        [difference(base, other, lambda answer: answer.right) for base, other in pairs],
        [prefixes(base, other, 1) for base, other in pairs],
        [prefixes(base, other, 3) for base, other in pairs],
    ):
        assert abs(float(np.mean(scores))) < 0.7
        assert 0.6 < float(np.std(scores)) < 1.5
        assert max(map(abs, scores)) < 5


def test_other_distributions_have_large_scores() -> None:
    base = answers(0, (0.5, 0.3, 0.2))
    other = answers(1, (0.4, 0.3, 0.3))
    assert difference(base, other, lambda answer: answer.right) > 4
    assert prefixes(base, other, 1) > 5
    assert prefixes(base, other, 3) > 5


def test_costs_are_relative_to_the_same_epoch_and_have_errors_over_seeds() -> None:
    lines = [replace(LINE, seed=seed, step=step) for seed in (0, 1) for step in range(18)]
    lines += [
        replace(line, method="auto", decode_steps=20 + 40 * line.seed + 10 * (line.step // 6), cpu_seconds=1.0)
        for line in lines
    ]
    row = [cell.strip() for cell in cost_table(lines).splitlines()[2].strip("|").split("|")]
    assert row[:4] == ["16 x 8", "off", "auto", "2"]
    assert row[4:7] == ["0.40 ± 0.20", "0.50 ± 0.20", "0.60 ± 0.20"]
    assert row[7:10] == ["0.50 ± 0.00"] * 3


def test_the_first_step_of_a_server_costs_no_seconds() -> None:
    lines = [replace(LINE, step=step) for step in range(18)]
    lines += [replace(line, method="auto", seconds=1000.0 if line.step == 0 else 4.0) for line in lines]
    row = cost_table(lines).splitlines()[2].split("|")
    assert row[11].strip() == "1.00"


@pytest.mark.parametrize(("separate", "error"), [(False, "0.007"), (True, "0.050")])
def test_answers_of_common_trainers_have_errors_of_sampling_and_of_two_trainers_over_seeds(
    separate: bool, error: str
) -> None:
    lines = [replace(LINE, separate=separate, seed=seed, step=step) for seed in (0, 1) for step in range(18)]
    lines += [replace(line, method="auto", right=0.5 + 0.1 * line.seed) for line in lines]
    row = answers_table(lines).splitlines()[2]
    assert f"0.500, 0.550 (+0.050 ± {error}" in row


def test_errors_are_within_prompts() -> None:
    sampled = [Sampled(number, [], [], float(number)) for number in (0, 1) for _ in range(8)]
    assert within_error(sampled, [answer.right for answer in sampled]) == 0
    values = [0.0, 1.0] * 8
    expected = np.sqrt(np.var(values[:8], ddof=1) / 16)
    assert within_error(sampled, values) == pytest.approx(expected)
