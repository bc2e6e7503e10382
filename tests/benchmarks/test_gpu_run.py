"""The GPU benchmark without a GPU: traces, plans, the report, and a dry run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import benchmark, plan, traces
from benchmarks.gpu.parts import training
from benchmarks.gpu.plan import AGAIN, OFF, ORDER, PLAIN, Budget
from darts_server.policy.latency import LatencyCurve

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
CURVE = LatencyCurve((1, 512), (0.002, 0.008), 1e-5)
DRY_SECONDS = 1500  # beside other tests; two minutes alone


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --- time -------------------------------------------------------------------


def test_unused_time_of_a_part_goes_to_the_next_ones() -> None:
    clock = Clock()
    given = []
    for name, budget in Budget(100, clock).split({"one": 1.0, "two": 1.0, "three": 2.0}):
        given.append((name, budget.remaining))
        clock.now += 5 if name == "one" else budget.remaining + 10
    assert given == [("one", 25.0), ("two", pytest.approx(95 / 3)), ("three", pytest.approx(95 * 2 / 3 - 10))]


def plan_within(seconds: float) -> plan.Plan:
    return plan.make_plan(CURVE, traces.sample(0, 128), ORDER, (1, 2, 4, 8), 2048, Budget(seconds, Clock()))


def test_prompts_are_reduced_before_lengths_and_essential_policies_fit_if_they_can() -> None:
    must, _ = plan.order_policies(ORDER)
    needed = sum(map(plan_within(10_000).estimate, must))
    found = [plan_within(seconds) for seconds in (needed, needed - 1, 60, 0)]
    sizes = [(each.trace.divisor, len(each.trace.prompts)) for each in found]
    assert sizes[:2] == [(1, 128), (1, 64)]
    assert sizes[2][0] > 1
    assert sum(map(found[2].estimate, must)) <= 60
    assert sizes[3] == (8, 64)


# --- running it -------------------------------------------------------------


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
    benchmark.stop(process)
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
@pytest.mark.timeout(1600)
def test_a_dry_run_fills_every_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "benchmarks/gpu/run", "--dry", "--minutes", "24", "--out", tmp_path],
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
    assert list(tables) == ["steps", "rollouts-8", "training", "costs", "weights"]
    assert not any(table["failed"] for table in tables.values())
    assert all(row["step, ms"] > 0 and row["bound, ms"] > 0 for row in tables["steps"]["rows"])
    rows = {row["policy"]: row for row in tables["rollouts-8"]["rows"]}
    dry = traces.sample(0, traces.SAMPLED).first(8).shortened(64)
    assert set(rows) == {PLAIN, AGAIN, *ORDER}
    for row in rows.values():
        assert row["seconds"] > 0
        assert row["generated"] == row["returned"] + row["wasted"]
        assert 0 <= row["idle"] <= 1
    assert rows[PLAIN]["generated"] == rows[OFF]["generated"] == rows[AGAIN]["generated"]
    assert rows["uniform"]["returned"] == sum(group.returned for group in plan.replay_all(plan.SHAPED["uniform"], dry))
    methods = {row["method"]: row for row in tables["training"]["rows"]}
    assert set(methods) == set(training.METHODS)
    assert methods["off"]["generated"] == methods["off"]["returned"]
    assert min(rows[PLAIN]["ratio to plain"], rows[AGAIN]["ratio to plain"]) == 1.0
    assert len(tables["costs"]["rows"]) == 11
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
