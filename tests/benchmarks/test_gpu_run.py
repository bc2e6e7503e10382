"""The GPU benchmark without a GPU: traces, plans, the report, and a dry run."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import child, cli, traces
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.one_model import Findings, run_part
from benchmarks.gpu.outlook import Outlook
from benchmarks.gpu.plan import Plan, make_plan, order_policies
from benchmarks.gpu.policies import AGAIN, OFF, ORDER, PLAIN, SHAPED, WAIT, predict_tokens, replay_all, statistics
from benchmarks.gpu.report import markdown
from benchmarks.gpu.steplog import StepLog, monotone
from benchmarks.gpu.tables import Table
from darts_server.policy.latency.curve import LatencyCurve
from darts_server.types import FinishReason

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
CURVE = LatencyCurve((1, 512), (0.002, 0.008), 1e-5)
DRY_SECONDS = 360


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- traces -----------------------------------------------------------------


def lengths_of(trace: traces.Trace) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    return np.array([prompt.lengths for prompt in trace.prompts])


def test_sampled_lengths_have_the_right_median_and_limit() -> None:
    trace = traces.sample(0, 256)
    lengths = lengths_of(trace)
    assert lengths.shape == (256, traces.CANDIDATES)
    assert 600 <= np.median(lengths) <= 800
    assert lengths.min() >= 1
    assert lengths.max() == trace.cap == 8192
    assert 0.005 <= (lengths == trace.cap).mean() <= 0.05


def test_sampled_lengths_have_a_long_tail_within_many_prompts() -> None:
    ratios = traces.ratios(traces.sample(0, 256))
    assert (ratios > 5).mean() > 0.2
    assert (ratios < 3).mean() > 0.2


def test_prompts_differ_in_their_median_length() -> None:
    medians = np.median(lengths_of(traces.sample(0, 256)), axis=1)
    assert np.percentile(medians, 90) > 2.5 * np.percentile(medians, 10)


def test_the_seed_determines_the_trace() -> None:
    assert traces.sample(3, 8) == traces.sample(3, 8) != traces.sample(4, 8)


def test_the_earlier_sample_differs_from_the_candidates() -> None:
    prompt = traces.sample(0, 1).prompts[0]
    assert len(prompt.earlier) == traces.EARLIER
    assert not set(prompt.earlier) <= set(prompt.lengths)


def test_divided_lengths_keep_the_shape_of_their_distribution() -> None:
    trace = traces.sample(0, 64)
    short = trace.shortened(4).shortened(2)
    assert short.divisor == 8
    assert short.cap == 1024
    np.testing.assert_allclose(lengths_of(short) * 8, lengths_of(trace), atol=8)
    assert short.reason(1024) is FinishReason.LENGTH
    assert short.reason(1023) is FinishReason.STOP


def test_candidates_that_replace_failed_ones_have_lengths() -> None:
    prompt = traces.sample(0, 1).prompts[0]
    assert prompt.length(traces.CANDIDATES + 1) == prompt.lengths[1]


def test_a_recorded_trace_is_read_and_filled_up(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text("\n\n".join(json.dumps({"lengths": lengths}) for lengths in ([10, 20, 4096], [7] * 20)))
    trace = traces.load_or_sample(str(file), 0)
    first, second = trace.prompts
    assert trace.cap == 4096
    assert first.lengths[:3] == (10, 20, 4096)
    assert set(first.lengths) | set(first.earlier) <= {10, 20, 4096}
    assert second.lengths == (7,) * traces.CANDIDATES


@pytest.mark.parametrize("line", ["[1, 2]", '{"lengths": []}', '{"lengths": [1, 0]}', '{"lengths": [1.5]}', "no"])
def test_an_invalid_trace_is_an_error_that_names_the_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(f'{{"lengths": [1]}}\n{line}\n')
    with pytest.raises(ValueError, match=r"lengths\.jsonl:2"):
        traces.recorded(file, 0)


# --- models and policies ----------------------------------------------------


def test_shapes_have_as_many_parameters_as_the_published_models() -> None:
    assert {name: shape.parameters for name, shape in SHAPES.items()} == {
        "0.6B": 596_049_920,
        "1.7B": 1_720_574_976,
        "8B": 8_190_735_360,
    }


def test_a_step_reads_all_weights_but_not_an_embedding_of_its_own() -> None:
    tied, untied = SHAPES["0.6B"], SHAPES["8B"]
    assert tied.step_bytes(0, 0) == tied.weight_bytes
    assert untied.step_bytes(0, 0) == untied.weight_bytes - 2 * untied.embedding
    assert untied.step_bytes(3, 10) - untied.step_bytes(0, 0) == 3 * 10 * 36 * 2 * 8 * 128 * 2


def test_unshaped_rollouts_decode_every_trajectory_to_its_end() -> None:
    trace = traces.sample(0, 8)
    every = [length for prompt in trace.prompts for length in prompt.lengths]
    assert predict_tokens(PLAIN, trace) == predict_tokens(OFF, trace) == predict_tokens(AGAIN, trace)
    assert sum(predict_tokens(PLAIN, trace)) == sum(sum(prompt.lengths[:8]) for prompt in trace.prompts)
    assert sum(predict_tokens(WAIT, trace)) == sum(sum(prompt.lengths[:12]) for prompt in trace.prompts)
    assert sum(predict_tokens(WAIT, trace)) < sum(every)


@pytest.mark.parametrize("policy", [name for name in ORDER if name in SHAPED])
def test_shaped_rollouts_stop_some_of_the_same_candidates(policy: str) -> None:
    trace = traces.sample(0, 16)
    tokens = predict_tokens(policy, trace)
    assert len(tokens) == 12 * 16
    assert sum(tokens) <= sum(sum(prompt.lengths) for prompt in trace.prompts)
    assert max(tokens) <= trace.cap


def test_a_prompts_statistics_come_from_its_earlier_sample() -> None:
    trace = traces.sample(0, 1)
    stats = statistics(trace.prompts[0], trace)
    assert stats.mean_ema == pytest.approx(np.mean(trace.prompts[0].earlier), rel=0.01)


def test_the_outlook_is_relative_to_plain() -> None:
    table = Outlook.of(traces.sample(0, 16), (OFF, WAIT)).table(CURVE, 2048)
    assert [row["prompts"] for row in table.rows] == [8, 16]
    assert all(row[OFF] == 1.0 for row in table.rows)
    assert all(float(row[WAIT] or 0) > 1.0 for row in table.rows)


# --- time -------------------------------------------------------------------


def test_unused_time_of_a_part_goes_to_the_next_ones() -> None:
    clock = Clock()
    given = []
    for name, budget in Budget(100, clock).split({"one": 1.0, "two": 1.0, "three": 2.0}):
        given.append((name, budget.remaining))
        clock.now += 5 if name == "one" else budget.remaining + 10
    assert given == [("one", 25.0), ("two", pytest.approx(95 / 3)), ("three", pytest.approx(95 * 2 / 3 - 10))]


def test_a_budget_ends_at_zero() -> None:
    clock = Clock()
    budget = Budget(10, clock)
    assert budget.fits(10)
    clock.now += 11
    assert budget.remaining == 0
    assert not budget.fits(0.1)


def plan_within(seconds: float, prompts: int = 128) -> Plan:
    return make_plan(CURVE, traces.sample(0, prompts), ORDER, (1, 2, 4, 8), 2048, Budget(seconds, Clock()))


def test_lengths_are_undivided_where_there_is_time() -> None:
    plan = plan_within(10_000)
    assert (plan.trace.divisor, len(plan.trace.prompts)) == (1, 128)


def test_prompts_are_reduced_before_lengths() -> None:
    whole = plan_within(10_000)
    must, _ = order_policies(ORDER)
    plan = plan_within(sum(map(whole.estimate, must)) - 1)
    assert (plan.trace.divisor, len(plan.trace.prompts)) == (1, 64)


def test_essential_policies_fit_or_the_rollout_is_as_small_as_possible() -> None:
    must, _ = order_policies(ORDER)
    plan = plan_within(60)
    assert plan.trace.divisor > 1
    assert sum(map(plan.estimate, must)) <= 60
    least = plan_within(0)
    assert (least.trace.divisor, len(least.trace.prompts)) == (8, 64)


def test_plain_vllm_runs_before_and_after_the_essential_policies() -> None:
    must, may = order_policies(("off", "uniform", "wait"))
    assert must == [PLAIN, "uniform", AGAIN]
    assert may == ["off", "wait"]


# --- steps ------------------------------------------------------------------


def log_of(*steps: tuple[float, int, float]) -> StepLog:
    log = StepLog()
    for step in steps:
        log.add(*step)
    return log


def test_the_median_step_counts_only_steps_with_exactly_this_batch() -> None:
    log = log_of((1, 4, 0.1), (2, 4, 0.9), (3, 4, 0.2), (4, 3, 5.0))
    assert log.median_step(4) == (0.2, 3)
    assert log.median_step(8) == (None, 0)
    assert log.between(1.5, 3).median_step(4) == (0.55, 2)


def test_idle_time_is_the_time_with_few_sequences() -> None:
    log = log_of((1.0, 8, 0.1), (3.0, 8, 0.1), (4.0, 1, 0.1), (6.0, 1, 0.1))
    assert log.idle_share(0.0, 6.0, threshold=2) == pytest.approx(0.5)
    assert log.idle_share(0.0, 6.0, threshold=1) == 0.0


def test_a_timeline_is_thinned_out_but_keeps_its_end() -> None:
    log = log_of(*((float(i), 5, 0.1) for i in range(1, 2001)))
    points = log.timeline(0.0)
    assert len(points) <= 401
    assert points[-1] == (2000.0, 5)


def test_a_curve_never_falls() -> None:
    assert monotone([(1, 2.0), (2, 1.5), (4, 3.0)]) == [(1, 2.0), (2, 2.0), (4, 3.0)]


# --- report -----------------------------------------------------------------


def rollouts() -> Table:
    table = Table("Rollouts", {"policy": "", "seconds": ".2f", "ratio to plain": ".3f", "GPU busy": ".0%"})
    table.rows.append({"policy": PLAIN, "seconds": 4.0, "ratio to plain": 1.0, "GPU busy": 0.5})
    table.rows.append({"policy": "uniform", "seconds": 3.0, "ratio to plain": 0.75, "GPU busy": None})
    return table


def costs() -> Table:
    return Table("Cost", {"measured": ""}, [{"measured": "something"}])


def test_a_table_formats_its_numbers_and_leaves_missing_ones_empty() -> None:
    table = rollouts()
    table.note("A note.")
    assert table.markdown().splitlines() == [
        "### Rollouts",
        "",
        "| policy | seconds | ratio to plain | GPU busy |",
        "| --- | --- | --- | --- |",
        "| plain | 4.00 | 1.000 | 50% |",
        "| uniform | 3.00 | 0.750 |  |",
        "",
        "A note.",
    ]


def test_the_report_has_every_table_with_rows_or_notes() -> None:
    found = Findings("0.6B", 40.0, tables={"rollouts-64": rollouts(), "costs": costs(), "empty": Table("Empty", {})})
    text = markdown({"card": "H200", "driver": None}, [found], {("0.6B", "rollouts-64"): "a.png"}, ["A note."])
    assert "| card | H200 |" in text
    assert "driver" not in text
    assert "| 0.6B | 64 | 1.00 | 0.75 |" in text
    assert "![Running sequences under each policy](a.png)" in text
    assert text.index("### Rollouts") < text.index("a.png") < text.index("### Cost")
    assert "### Empty" not in text


def test_the_report_of_a_model_that_did_not_start_says_so() -> None:
    text = markdown({}, [Findings("8B", error="exit code 1", log_tail="no memory"), Findings("1.7B")], {}, [])
    assert "**Stopped: exit code 1**" in text
    assert "```\nno memory\n```" in text
    assert "## 1.7B" in text


def test_findings_survive_a_round_trip_through_their_file(tmp_path: Path) -> None:
    found = Findings("0.6B", tables={"rollouts-64": rollouts()}, timelines={"rollouts-64": {PLAIN: [[0.1, 8]]}})
    found.write(tmp_path / "found.json")
    assert Findings.read(tmp_path / "found.json") == found


async def failing() -> None:
    raise MemoryError("out of memory")


async def slow() -> None:
    async with asyncio.timeout(0):
        await asyncio.sleep(1)


def test_a_failed_part_is_noted_in_its_table_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    table = rollouts()
    asyncio.run(run_part(failing(), table, Budget(10)))
    assert table.failed
    assert table.notes == ["Failed: MemoryError: out of memory"]
    assert "a part failed" in caplog.text
    asyncio.run(run_part(slow(), table, Budget(9.6)))
    assert table.notes[1:] == ["Stopped: it took longer than its 10 s."]


# --- running it -------------------------------------------------------------


def test_defaults_depend_on_quick_and_dry() -> None:
    full, quick, dry = (cli.arguments(argv) for argv in ([], ["--quick"], ["--dry"]))
    assert full.models == ("0.6B", "1.7B", "8B")
    assert (full.prompts, full.minutes) == ((256, 16), 9.0)
    assert quick.models == ("0.6B", "1.7B")
    assert (quick.prompts, quick.minutes) == ((64, 16), 4.0)
    assert (dry.models, dry.prompts) == (("tiny",), (8,))
    assert full.policies == ORDER


def test_flags_after_two_dashes_go_to_vllm() -> None:
    options = cli.arguments(["--models", "8B", "--prompts", "32,64,32", "--", "--dtype", "half"])
    assert options.flags == ("--dtype", "half")
    assert options.models == ("8B",)
    assert options.prompts == (32, 64)


@pytest.mark.parametrize(
    "argv",
    [
        ["--models", "70B"],
        ["--dry", "--models", "8B"],
        ["--policies", "fastest"],
        ["--prompts", "many"],
        ["--prompts", "4"],
        ["--minutes", "-1"],
        ["--trace", "nowhere.jsonl"],
    ],
)
def test_invalid_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.arguments(argv)
    assert argv[-2] in capsys.readouterr().err


def test_a_process_is_stopped_with_all_its_children(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    while not (file.exists() and file.read_text()):
        time.sleep(0.02)
    child.stop(process)
    assert process.returncode is not None
    until = time.monotonic() + 30
    while alive(int(file.read_text())) and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive(int(file.read_text()))


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_a_dry_run_fills_every_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "benchmarks/gpu/run", "--dry", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=DRY_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "results.json").read_text())
    (model,) = result["models"]
    assert model["error"] is None
    tables = model["tables"]
    assert list(tables) == ["steps", "rollouts-8", "costs", "weights", "outlook"]
    assert not any(table["failed"] for table in tables.values())
    assert all(row["step, ms"] > 0 and row["bound, ms"] > 0 for row in tables["steps"]["rows"])
    rows = {row["policy"]: row for row in tables["rollouts-8"]["rows"]}
    assert set(rows) == {PLAIN, AGAIN, *ORDER}
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["generated"] == row["returned"] + row["wasted"]
        assert 0 <= row["idle"] <= 1
    assert rows[PLAIN]["generated"] == rows[OFF]["generated"] == rows[AGAIN]["generated"]
    assert rows[WAIT]["generated"] == sum(sum(p.lengths[:12]) for p in dry_trace().prompts)
    assert rows[WAIT]["returned"] < rows[PLAIN]["returned"]
    assert rows["uniform"]["returned"] == sum(group.returned for group in replay_all(SHAPED["uniform"], dry_trace()))
    assert min(rows[PLAIN]["ratio to plain"], rows[AGAIN]["ratio to plain"]) == 1.0
    assert len(tables["costs"]["rows"]) == 10
    assert all(row["value"] > 0 for row in tables["costs"]["rows"])
    assert [(row["path"], row["updates"]) for row in tables["weights"]["rows"]] == [("from disk", 2), ("pushed", 2)]
    for row in tables["weights"]["rows"]:
        phases = [row[f"{phase}, s"] for phase in ("transfer", "check", "pause", "load", "resume")]
        assert all(seconds > 0 for seconds in phases)
        assert row["total, s"] > sum(phases)
        assert row["GB/s"] == pytest.approx(row["GB"] / row["total, s"])
        assert f"| {row['path']} | {row['GB']:.3g} | 2 | {phases[0]:.3f} |" in done.stdout
    assert not list(tmp_path.glob("model-*")), "a checkpoint was left behind"
    assert done.stdout == (tmp_path / "results.md").read_text() + "\n"
    for table in tables.values():
        assert f"# {table['title']}\n" in done.stdout
    assert (tmp_path / "rollouts-8-tiny.png").read_bytes().startswith(b"\x89PNG")


def dry_trace() -> traces.Trace:
    return traces.sample(0, traces.SAMPLED).first(8).shortened(64)
