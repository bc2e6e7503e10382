"""The tables and logs of the comparison, from made-up runs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from tqdm import tqdm

from benchmarks import rl
from benchmarks.rl_methods import CARRY_OVER, OWN_SERVER, PRUNING, RESUMED, STARTS, caps, methods
from benchmarks.rl_question import Comparison, Verdict, best_cap, question
from benchmarks.rl_table import Difference, learning_curve, relative, rights_at, rights_at_equal, spent_until, tables
from examples.tiny_rl.train_log import Entry, HeldOut, Seconds, Training, read_log


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
NEVER = trained([0.5, 0.6, 0.7, 0.8], tokens=1500, seconds=4.0)


def test_a_curve_has_what_was_spent_until_each_evaluation() -> None:
    assert [(p.steps, p.generated, p.decode_steps, p.seconds, p.right) for p in learning_curve(OFF)] == [
        (0, 0, 0, 0, 0.5),
        (2, 2000, 200, 4, 0.7),
        (4, 4000, 400, 8, 0.9),
        (6, 6000, 600, 12, 0.94),
    ]


@pytest.mark.parametrize(
    ("level", "axis", "expected"),
    [(0.85, "steps", 3.5), (0.85, "generated", 3500), (0.9, "seconds", 8), (0.5, "steps", 0), (0.95, "steps", None)],
)
def test_a_level_is_reached_on_the_line_between_evaluations(level: float, axis: str, expected: float | None) -> None:
    assert spent_until(learning_curve(OFF), level, axis) == (None if expected is None else pytest.approx(expected))


def test_the_first_time_counts_even_if_the_run_falls_back() -> None:
    assert spent_until(learning_curve(trained([0.5, 0.9, 0.6, 0.9])), 0.9, "steps") == pytest.approx(2)


def test_right_answers_at_a_budget_are_on_the_same_line() -> None:
    assert rights_at(learning_curve(OFF), 3000, "generated") == pytest.approx([0.82, 0.78, 0.8, 0.8])


def test_equal_budgets_are_those_of_the_cheapest_policy_with_the_same_seed() -> None:
    runs = {"off": {0: OFF, 1: OFF}, "cheap": {0: CHEAP, 1: OFF}}
    assert [each.mean() for each in rights_at_equal(runs, "off", "generated")] == pytest.approx([0.8, 0.94])
    assert [each.mean() for each in rights_at_equal(runs, "cheap", "seconds")] == pytest.approx([0.92, 0.94])


def test_a_difference_is_paired_by_prompt_and_its_error_the_larger_of_those_over_prompts_and_over_seeds() -> None:
    hard_or_easy = np.array([0.1, 0.9, 0.5, 0.7])
    better = Difference.of([hard_or_easy + 0.02, hard_or_easy + 0.02], [hard_or_easy, hard_or_easy])
    assert (better.mean, better.error) == pytest.approx((0.02, 0.0))
    assert better.is_certain
    prompts_differ = Difference.of([np.array([0.4, 0.6])] * 2, [np.array([0.5, 0.5])] * 2)
    assert (prompts_differ.mean, prompts_differ.error) == pytest.approx((0.0, 0.1))
    seeds_differ = Difference.of([np.array([0.6, 0.6]), np.array([0.5, 0.5])], [np.array([0.5, 0.5])] * 2)
    assert (seeds_differ.mean, seeds_differ.error) == pytest.approx((0.05, 0.05))
    assert not seeds_differ.is_certain
    assert str(Difference.of([np.array([0.6, 0.5])], [np.array([0.5, 0.5])])) == "+0.050 ± 0.050"


def test_what_a_level_took_is_relative_to_off_with_the_same_seed() -> None:
    runs = {
        "off": {0: OFF, 1: OFF, 2: OFF},
        "mixed": {0: CHEAP, 1: OFF, 2: NEVER},
        "never": dict.fromkeys(range(3), NEVER),
    }
    assert relative(runs, "mixed", 0.9, "steps") == "1.00"
    assert relative(runs, "never", 0.9, "seconds") == "never"
    assert relative(runs, "off", 0.99, "steps") == "-"


def test_tables_have_a_row_for_each_policy_and_means_with_ranges_over_seeds() -> None:
    text = tables("wordier", {"off": {0: OFF, 1: OFF}, "uniform": {0: CHEAP, 1: OFF}})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["policy", "off", "uniform", "policy", "off", "uniform"]
    assert rows[1][1:3] == ["0.940 [0.940, 0.940]", ""]
    assert rows[2][1:4] == ["0.930 [0.920, 0.940]", "-0.010 ± 0.010", "easy 0.93, hard 0.93"]
    assert rows[2][4:6] == ["30.0 [30.0, 30.0]", "80.0 [80.0, 80.0]"]
    assert rows[5][1:] == [
        "750", "375", "75", "75", "0.0%", "2.0%", "0.100", "0.75", "0.38", "0.38", "0.75 [0.50, 1.00]",
        "0.93, 0.71, 0.71, 0.71", "1.00, 0.75, 0.75, 0.75",
    ]  # fmt: skip
    assert text.startswith("wordier: what was learned")


def test_quick_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rl.main(["--quick", "--report", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "one start, 2 seeds, 12 steps of off; off, cap 64; uniform; darts_cut" in out


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
    assert (out / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    shorter = rl.arguments(["--steps", "4", "--policies", "off", "uniform"]).plan
    assert rl.read_runs(shorter, "standard", out)["off"] == {0: logged(OFF[:5])}, "the first steps of longer runs"


def test_policies_without_off_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rl.arguments(["--policies", "uniform"])
    assert "--policies must include off" in capsys.readouterr().err


def test_each_start_has_three_caps_as_controls_and_the_same_policies() -> None:
    for start in STARTS:
        assert len(caps(start)) == 3
        assert {"off", *caps(start), "off, overlong", "off, tail batching", "darts_cut"} <= methods(start).keys()
    assert methods("deep")["off, cap 64"].max_tokens == 64
    assert [name for name, method in methods("deep").items() if method.unbiased] == [
        "off, unbiased",
        "uniform, unbiased",
    ]
    assert methods("mixed").keys() - methods("deep").keys() == {"off, cap 240"}


def test_methods_with_carry_over_are_run_only_if_they_are_named() -> None:
    assert not rl.arguments([]).plan.methods("mixed").keys() & CARRY_OVER.keys()
    named = rl.arguments(["--policies", "off", *CARRY_OVER]).plan.methods("mixed")
    assert named.keys() == {"off", *CARRY_OVER}
    assert (*PRUNING, "off, carry resume", "cap, carry resume", *RESUMED) == OWN_SERVER


def test_the_share_of_tokens_of_older_weights_is_over_all_that_were_trained_on() -> None:
    whole, half = replace(step(1000, 1.0), off_policy=1.0), replace(step(3000, 1.0), off_policy=0.0)
    entries = [Entry(0, held_out=held_out(0.5)), Entry(1, whole), Entry(2, half, held_out(0.6))]
    row = tables("deep", {"off": {0: entries}}).splitlines()[-1]
    assert row.split("|")[6].strip() == "25.0%"


def test_decode_steps_are_also_given_for_the_last_third_when_prompts_are_known() -> None:
    steps = [Entry(number, step(tokens, 1.0)) for number, tokens in enumerate([3000, 2000, 1000, 500, 400, 300], 1)]
    entries = [Entry(0, held_out=held_out(0.5)), *steps, Entry(7, step(200, 1.0), held_out(0.6))]
    cells = tables("deep", {"off": {0: entries}}).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[4:6]] == ["106", "30"]


def test_logs_from_before_have_no_tokens_of_older_weights(tmp_path: Path) -> None:
    fields = json.loads(OFF[1].line())
    del fields["training"]["off_policy"]
    (tmp_path / "log.jsonl").write_text(json.dumps(fields))
    assert read_log(tmp_path / "log.jsonl") == [OFF[1]]


def test_a_cap_is_run_from_the_starts_that_have_it() -> None:
    plan = rl.arguments(["--policies", "off", "off, cap 64", "off, cap 240"]).plan
    assert list(plan.methods("deep")) == ["off", "off, cap 64"]
    assert list(plan.methods("mixed")) == ["off", "off, cap 240"]


CAPPED = trained([0.5, 0.75, 0.89, 0.89], seconds=1.0)
LOW = trained([0.5, 0.6, 0.6, 0.6], seconds=0.5)
CAPS = {"deep": ("off, cap 48", "off, cap 64")}


def test_the_best_cap_is_the_one_that_is_right_most_often_at_equal_time() -> None:
    runs = {"off": {0: OFF}, "off, cap 48": {0: LOW}, "off, cap 64": {0: CAPPED}}
    assert best_cap(runs, CAPS["deep"], "seconds") == "off, cap 64"
    assert best_cap({"off": {0: OFF}}, CAPS["deep"], "seconds") is None


@pytest.mark.parametrize(
    ("with_off", "with_cap", "verdict"),
    [
        ((-0.01, 0.01), (0.03, 0.01), Verdict.YES),
        ((-0.03, 0.01), (0.03, 0.01), Verdict.NO),
        ((0.0, 0.01), (0.01, 0.01), Verdict.OPEN),
        ((0.0, 0.01), (-0.001, 0.01), Verdict.NO),
    ],
)
def test_a_verdict_needs_no_certain_loss_to_off_and_a_certain_gain_on_the_cap(
    with_off: tuple[float, float], with_cap: tuple[float, float], verdict: Verdict
) -> None:
    assert Comparison(Difference(*with_off), Difference(*with_cap)).verdict is verdict


def test_the_question_is_answered_by_policies_that_hold_from_every_start() -> None:
    def start(ahead: list[Entry]) -> dict[str, dict[int, list[Entry]]]:
        runs = {"off": OFF, "off, cap 48": LOW, "off, cap 64": CAPPED, "uniform": OFF, "cap": ahead}
        return {policy: {0: entries, 1: entries} for policy, entries in runs.items()}

    good = trained([0.5, 0.9, 0.94, 0.96], seconds=0.5)
    both = {"deep": CAPS["deep"], "mixed": CAPS["deep"]}
    text = question({"deep": start(good), "mixed": start(good)}, both, "seconds")
    assert "with off, cap 64 at equal time" in text
    by_steps = question({"deep": start(good)}, {"deep": CAPS["deep"]}, "decode_steps")
    assert "with off, cap 64 at equal decode steps" in by_steps
    assert "| cap | +0.020 ± 0.000; +0.070 ± 0.000; yes |" in by_steps
    assert "| cap | +0.020 ± 0.000; +0.140 ± 0.000; yes | +0.020 ± 0.000; +0.140 ± 0.000; yes |" in text
    assert "| off, cap" not in text
    assert "beyond 2 standard errors: cap." in text
    assert "beyond 2 standard errors: none." in question({"deep": start(good), "mixed": start(OFF)}, both, "seconds")
    assert "No fixed cap was run" in question({"deep": {"off": {0: OFF}}}, CAPS, "seconds")


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


def test_a_turn_has_several_steps_and_the_last_one_what_is_left() -> None:
    order: list[str] = []
    runs = [FakeRun("a", 0, order), FakeRun("b", 0, order)]
    with tqdm(disable=True, total=10) as bar:
        rl.train_in_turns(cast(list[rl.Run], runs), 4, 3, bar)
        assert [run.logged for run in runs] == [5, 5]
    assert order == ["a evaluates", "b takes over a0", "a3", "b3", "b4", "a4"]


@pytest.mark.parametrize("steps", ["0", "2", "6"])
def test_a_turn_that_an_evaluation_would_interrupt_is_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        rl.arguments(["--turn", steps])
    assert "--turn must be 1 or 3" in capsys.readouterr().err


def test_frozen_models_learn_nothing_and_are_evaluated_at_the_end_alone() -> None:
    options = rl.arguments(["--frozen", "--steps", "6"])
    recipe = options.plan.recipe
    assert (recipe.learning_rate, str(options.out)) == (0.0, "out/rl-frozen")
    assert not any(step % recipe.held_out_every == 0 for step in range(1, recipe.steps + 1))
    learns = rl.arguments(["--steps", "6"]).plan.recipe
    assert (learns.learning_rate > 0, learns.held_out_every) == (True, 3)


def test_a_start_s_model_is_taken_from_the_repository_or_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (rl.start_model("deep", tmp_path) / "model.safetensors").is_file()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(rl, "STARTED", tmp_path / "none")
    trained_before = tmp_path / "starts" / "deep"
    trained_before.mkdir(parents=True)
    (trained_before / "config.json").touch()
    assert rl.start_model("deep", tmp_path) == trained_before


def test_what_is_saved_counts_as_done(tmp_path: Path) -> None:
    plan = rl.arguments(["--steps", "6", "--policies", "off", "uniform", "darts"]).plan
    for policy in ("off", "uniform"):
        log = rl.log_path(tmp_path, "deep", policy, 0)
        log.parent.mkdir(exist_ok=True)
        log.write_text("\n".join(entry.line() for entry in OFF[:4]))
    rl.log_path(tmp_path, "deep", "off", 0).with_suffix(".pt").touch()
    assert rl.entries_left(plan, "deep", 0, tmp_path) == 3 + 7 + 7, "a log without a saved run cannot be continued"


def test_kept_logs_make_the_same_table_and_only_complete_runs_are_kept(tmp_path: Path) -> None:
    argv = ["--steps", "6", "--policies", "off", "uniform", "auto", "--starts", "standard", "--seeds", "0", "1"]
    out, kept = tmp_path / "out", tmp_path / "kept"
    for policy, entries in (("off", OFF), ("uniform", CHEAP), ("auto", CHEAP)):
        for seed in range(2):
            log = rl.log_path(out, "standard", policy, seed)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text("".join(f"{json.dumps(asdict(entry))}\n" for entry in entries[: 7 - seed]))
            log.with_suffix(".state").touch()
    assert rl.main([*argv, "--report", "--out", str(out), "--keep", str(kept)]) == 0
    assert sorted(path.name for path in kept.rglob("*.*")) == ["auto-0.jsonl", "off-0.jsonl", "uniform-0.jsonl"]
    plan = rl.arguments(argv).plan
    assert rl.read_runs(plan, "standard", kept)["auto"] == {0: logged(CHEAP)}
    assert rl.report(plan, kept).splitlines()[1:] == rl.report(plan, out).splitlines()[1:]
    long, short = (rl.log_path(folder, "standard", "off", 0).stat().st_size for folder in (out, kept))
    assert short < 0.9 * long
    assert rl.report(plan, kept).endswith("auto, certainly less right than off: standard.")
