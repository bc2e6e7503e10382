"""The GPU benchmark without a GPU: traces, plans, the report, and a dry run."""

import json
import subprocess
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import benchmark, plan, traces
from benchmarks.gpu.models import SHAPES, TINY, Shape
from benchmarks.gpu.parts import training, weights
from benchmarks.gpu.plan import AGAIN, OFF, ORDER, PLAIN, Budget
from darts_server.estimates.latency import LatencyCurve

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).resolve().parents[2]
GB = 10**9
LARGE = SHAPES["8B"]
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
    found = [plan_within(seconds) for seconds in (needed + 0.001, needed - 1, 60, 0)]
    sizes = [(each.trace.divisor, len(each.trace.prompts)) for each in found]
    assert sizes[:2] == [(1, 128), (1, 64)]
    assert sizes[2][0] > 1
    assert sum(map(found[2].estimate, must)) <= 60
    assert sizes[3] == (8, 64)


# --- weight updates: the checkpoint and the disk ------------------------------


@pytest.mark.parametrize("shape", [TINY, *SHAPES.values()])
def test_a_checkpoint_has_every_parameter_once(shape: Shape) -> None:
    assert sum(prod(size) for _, size in shape.tensors()) == shape.parameters


def test_a_checkpoint_has_the_names_and_shapes_of_the_published_models(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(TINY.write(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dict(TINY.tensors()) == {name: tuple(each.shape) for name, each in model.named_parameters()}
    assert [name for name, _ in LARGE.tensors()][-1] == "lm_head.weight"


def test_paths_without_disk_space_are_left_out() -> None:
    result = weights.table()
    assert weights.possible_paths(LARGE, 40 * GB, result) == [weights.DISK, weights.PUSHED]
    assert result.notes == []
    assert weights.possible_paths(LARGE, 20 * GB, result) == [weights.DISK]
    assert result.notes == ["Left out for lack of space: pushed, which needs 33.8 GB where --out is; 20.0 GB are free."]
    assert weights.possible_paths(LARGE, 10 * GB, weights.table()) == []


# --- running it -------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_process_is_stopped_with_all_its_children() -> None:
    command = ["sh", "-c", "sleep 6000 & echo; wait"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as pipe:
        pipe.readline()
        benchmark.stop(process)
        assert process.returncode is not None
        assert pipe.read() == b"", "the pipe ends when no process has it any more"


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
    assert not list(tmp_path.glob("model-*")), "a checkpoint was left behind"
    assert done.stdout == (tmp_path / "results.md").read_text() + "\n"
    assert all(f"# {table['title']}\n" in done.stdout for table in tables.values())
    assert (tmp_path / "rollouts-8-tiny.png").read_bytes().startswith(b"\x89PNG")
