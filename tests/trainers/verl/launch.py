"""Runs the programs of this folder in the environment that has veRL. Run as a program, it trains:

    python -m tests.trainers.verl.launch FOLDER STEPS POLICY

prints a line of JSON for each step, and for the validation before the first step and after the last.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.trainers.environments import ROOT, create

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "clients"))),
    "VERL_USE_EXTERNAL_MODULES": "tests.trainers.verl.cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray and the servers listen on loopback alone. Ray replaces `_node_ip_address=127.0.0.1` by another address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # The tests of a busy machine are not to be killed for the memory of others.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_raylet_start_wait_time_s": "300",
}
STEP = re.compile(r"step:(\d+) - ")
METRIC = re.compile(r"([\w/@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)")
METRICS = {
    "critic/score/mean": "reward",
    "response_length/mean": "length",
    "actor/grad_norm": "gradient",
    "training/rollout_probs_diff_max": "gap",
    "timing_s/step": "seconds",
    "val-aux/tiny/reward/mean@1": "held_out",
}
"""veRL's metrics, and their names in our lines. gap: the largest difference of probabilities, server to trainer."""
LAST_LINES = 100


def run(python: Path, program: str, *arguments: str) -> Iterator[str]:
    """Run a program of this folder; yield its lines. Raises RuntimeError if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    command = [str(python), "-m", f"tests.trainers.verl.{program}", *arguments]
    last: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | ENVIRONMENT,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last = [*last[1 - LAST_LINES :], line]
                yield line.rstrip()
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(f"{program} exited with code {process.returncode}:\n{''.join(last)}")


def train(python: Path, folder: Path, steps: int, policy: str) -> Iterator[dict[str, float]]:
    """Run `main_ppo`; yield the metrics of each step. Step 0 is the validation before the training."""
    for line in run(python, "train", str(folder), str(steps), policy):
        found = STEP.search(line)
        if found is not None:
            metrics = {METRICS[name]: float(value) for name, value in METRIC.findall(line) if name in METRICS}
            yield {"step": int(found[1]), **metrics}


if __name__ == "__main__":
    home = Path(sys.argv[1]).absolute()
    home.mkdir(parents=True, exist_ok=True)
    for step in train(create("verl"), home, int(sys.argv[2]), sys.argv[3]):
        print(json.dumps(step), flush=True)
