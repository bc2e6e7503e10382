"""How far the prediction by which `auto` forecasts is from the simulation that drives groups, and their CPU time.

Usage: ``python -m benchmarks.forecasts [PRESET ...]``. Both get the same batches. Takes ten seconds on one core.
"""

import argparse
from statistics import median
from time import process_time

from darts_server.policy.simulation.prediction import predict
from darts_server.policy.simulation.rollout import simulate
from darts_server.simulation.policies import parse_policy
from darts_server.simulation.presets import PRESETS
from darts_server.simulation.training import Candidates, Setting

SIZE, STEPS = 8, 3
POLICIES = ("off", "uniform", "uniform,redundancy=2", "darts", "darts_cut,adaptive=no", "cap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", default=["dapo-32b", "deepcoder-14b-16k"])
    for name in parser.parse_args().presets:
        for policy in POLICIES:
            print(f"{name:<18} {policy:<22} {measure(name, policy)}", flush=True)


def measure(name: str, text: str) -> str:
    """Return the errors of predicted rollouts, and the seconds that prediction and simulation take."""
    preset, policy = PRESETS[name], parse_policy(text, SIZE)
    setting = Setting(preset.machine, SIZE, preset.prompts, STEPS)
    candidates = Candidates(preset.workload, setting, policy.most_candidates(SIZE))
    errors, predicting, simulating = [], [], []
    for step in range(STEPS):
        prompts = candidates.step_prompts(step)
        plan = policy.plan(SIZE, [candidates.std(prompt.number) for prompt in prompts], None)
        batch = candidates.batch(prompts, max(plan.candidates))
        begun = process_time()
        predicted = predict(batch, plan, preset.machine).seconds
        between = process_time()
        errors.append(predicted / simulate(batch, plan, preset.machine).seconds - 1)
        predicting.append(between - begun)
        simulating.append(process_time() - between)
    each = ", ".join(f"{error:+.1%}" for error in errors)
    return f"{each}; {1000 * median(predicting):.0f} ms for {1000 * median(simulating):.0f}"


if __name__ == "__main__":
    main()
