"""The tables and logs of the comparison, from made-up runs."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tqdm import tqdm

from benchmarks import rl
from benchmarks.rl_methods import methods
from benchmarks.rl_table import Difference, learning_curve, rights_at_equal
from darts_server.control import Control
from darts_server.settings import load
from darts_server.types import RequestOptions
from examples.tiny_rl.train_log import Entry, HeldOut, Seconds, Training


def trained(rights: list[float], tokens: int = 1000, seconds: float = 2.0) -> list[Entry]:
    """A run evaluated before it and after every second step."""
    entries = [Entry(0, held_out=held_out(rights[0]))]
    for index, right in enumerate(rights[1:], start=1):
        entries.append(Entry(2 * index - 1, step(tokens, seconds)))
        entries.append(Entry(2 * index, step(tokens, seconds), held_out(right)))
    return entries


def step(tokens: int, seconds: float) -> Training:
    parts = Seconds(rollout=seconds / 2, train=seconds / 4, push=seconds / 4)
    return Training(0.5, 0.1, 30.0, 90.0, 0.02, tokens, tokens // 2, tokens // 10, -0.1, 0.2, 1e-5, 1, parts)


def held_out(right: float) -> HeldOut:
    rights = {"easy": [right + 0.02, right - 0.02], "hard": [right, right]}
    return HeldOut(384, right, 0.02, 30.0, 80.0, 5.0, 0.01, rights)


def logged(entries: list[Entry]) -> list[Entry]:
    """What a log has of a run."""
    return [Entry.read(entry.line()) for entry in entries]


OFF = trained([0.5, 0.7, 0.9, 0.94])
CHEAP = trained([0.5, 0.8, 0.9, 0.92], tokens=500, seconds=1.0)


def test_a_curve_has_what_was_spent_until_each_evaluation() -> None:
    assert [(p.steps, p.generated, p.decode_steps, p.seconds, p.right) for p in learning_curve(OFF)] == [
        (0, 0, 0, 0, 0.5),
        (2, 2000, 200, 4, 0.7),
        (4, 4000, 400, 8, 0.9),
        (6, 6000, 600, 12, 0.94),
    ]


def test_equal_budgets_are_those_of_the_cheapest_policy_with_the_same_seed() -> None:
    runs = {"off": {0: OFF, 1: OFF}, "cheap": {0: CHEAP, 1: OFF}}
    assert [each.mean() for each in rights_at_equal(runs, "off", "generated")] == pytest.approx([0.8, 0.94])
    assert [each.mean() for each in rights_at_equal(runs, "cheap", "seconds")] == pytest.approx([0.92, 0.94])


def test_a_difference_is_paired_by_prompt_and_its_error_the_larger_of_those_over_prompts_and_over_seeds() -> None:
    hard_or_easy = np.array([0.1, 0.9, 0.5, 0.7])
    better = Difference.of([hard_or_easy + 0.02, hard_or_easy + 0.02], [hard_or_easy, hard_or_easy])
    assert (better.mean, better.error) == pytest.approx((0.02, 0.0))
    prompts_differ = Difference.of([np.array([0.4, 0.6])] * 2, [np.array([0.5, 0.5])] * 2)
    assert (prompts_differ.mean, prompts_differ.error) == pytest.approx((0.0, 0.1))
    seeds_differ = Difference.of([np.array([0.6, 0.6]), np.array([0.5, 0.5])], [np.array([0.5, 0.5])] * 2)
    assert (seeds_differ.mean, seeds_differ.error) == pytest.approx((0.05, 0.05))
    assert str(Difference.of([np.array([0.6, 0.5])], [np.array([0.5, 0.5])])) == "+0.050 ± 0.050"


def test_seeds_with_incomplete_runs_are_left_out(tmp_path: Path) -> None:
    plan = rl.arguments(["--steps", "6", "--policies", "off", "uniform", "--starts", "standard"]).plan
    out = tmp_path
    for policy, entries in (("off", OFF), ("uniform", CHEAP)):
        for seed, count in ((0, 7), (1, 7 if policy == "off" else 4)):
            log = rl.log_path(out, "standard", policy, seed)
            log.parent.mkdir(exist_ok=True)
            log.write_text("\n".join(entry.line() for entry in entries[:count]))
    assert rl.read_runs(plan, "standard", out) == {"off": {0: logged(OFF)}, "uniform": {0: logged(CHEAP)}}
    assert "| uniform |" in rl.report(plan, out)
    assert (out / "methods.png").read_bytes().startswith(b"\x89PNG")
    shorter = rl.arguments(["--steps", "4", "--policies", "off", "uniform"]).plan
    assert rl.read_runs(shorter, "standard", out)["off"] == {0: logged(OFF[:5])}, "the first steps of longer runs"


class FakeRun:
    """Records its turns in a list that it shares with other runs."""

    def __init__(self, name: str, logged: int, order: list[str]) -> None:
        self.name, self.logged, self.order = name, logged, order

    def begin(self, evaluation: str | None = None) -> int:
        if self.logged:
            return 0
        self.logged = 1
        self.order.append(f"{self.name} takes over {evaluation}" if evaluation else f"{self.name} evaluates")
        return 1

    def evaluation(self) -> str:
        return f"{self.name}0"

    def advance(self, step: int) -> int:
        new = max(0, step + 1 - self.logged)
        self.logged += new
        self.order += [f"{self.name}{step}"] * bool(new)
        return new


def test_runs_take_turns_and_those_that_are_behind_catch_up_first() -> None:
    order: list[str] = []
    runs = [FakeRun("a", 2, order), FakeRun("b", 0, order), FakeRun("c", 2, order)]
    with tqdm(disable=True) as bar:
        rl.train_in_turns(cast(list[rl.Run], runs), 3, 1, bar)
    assert order == ["b takes over a0", "b1", "b2", "c2", "a2", "c3", "a3", "b3"]


@pytest.mark.parametrize("name", [name for name, of in methods("deep").items() if not isinstance(of.policy, str)])
def test_settings_of_a_policy_are_ones_that_a_request_may_change(name: str) -> None:
    policy = methods("deep")[name].policy
    assert not isinstance(policy, str)
    planner = Control(load({}, None)).new_planner(policy)
    assert planner.default_policy == policy["name"]
    assert planner.plan(8, RequestOptions()) is not None
