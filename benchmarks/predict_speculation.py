"""Predict what speculation brings on an H200 with an 8B model, by the measured times of its decode steps.

    python -m benchmarks.predict_speculation       # a minute, no GPU

Prints two tables by the acceptance of a drafted token: the time of a rollout of DAPO's lengths, and the time of a token
while a fixed number of sequences runs. Both are relative to the same without drafts.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.tables import markdown
from darts_server.drafts.lengths import MAX_DRAFT_TOKENS
from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.engines import Machine
from darts_server.offline.simulation.policies import parse_policy
from darts_server.offline.simulation.presets import PRESETS
from darts_server.offline.simulation.training import Candidates, run_policy

SIZE = 8
PROMPTS = (64, 256)
POLICIES = {"off": "off", "carry-over": "off,start=1.5,carry=resume,order=long", "auto": "auto"}
"""Policies by their names in the table. Carry-over always starts 1.5 times the prompts."""
SEQUENCES = (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
STEPS = 6
MEASURED = LatencyCurve((1, 64, 256, 512, 2048), (0.0052, 0.0063, 0.0116, 0.0210, 0.0778), (0.0778 - 0.0210) / 1536)
"""Seconds of decode steps with a context of 248 tokens for each sequence, see results.md."""
ACCEPTANCES = {
    ".2: SmolLM2, word problems, temperature 1, other answers": 0.213,
    ".39: SmolLM2, temperature .7, other answers": 0.390,
    ".45: SmolLM2, temperature .7, earlier epochs": 0.454,
    ".5": 0.5,
    ".55: tiny task, other answers": 0.547,
    ".7": 0.7,
    ".88: tiny task, earlier epochs": 0.880,
    ".9": 0.9,
}
"""An acceptance with the name of a model gives as many tokens a step as were measured for 8 drafts: with acceptance a
1 + a + ... + a^8. Measured: 1.27, 1.64, 1.83, 2.2 and 5.7."""


def machine_of(acceptance: float) -> Machine:
    preset = PRESETS["h200-8b"].machine
    drafts = tuple((acceptance ** np.arange(1, MAX_DRAFT_TOKENS + 1)).tolist()) if acceptance else ()
    times = replace(preset.step_time, decode=MEASURED, per_context_token=0.0, drafts=drafts)
    return replace(preset, step_time=times)


def rollout_seconds(policy: str, prompts: int, acceptance: float) -> float:
    workload = PRESETS["h200-8b"].workload
    candidates = Candidates(workload, machine_of(acceptance), SIZE, prompts, STEPS, 2 * SIZE)
    run = run_policy(parse_policy(POLICIES[policy], SIZE), candidates)
    return float(np.mean([step.rollout.seconds for step in run]))


def token_seconds(sequences: Sequence[int], acceptance: float) -> np.ndarray:
    counts = np.asarray(sequences, dtype=np.float64)
    seconds, _ = machine_of(acceptance).step_time.seconds_per_token(counts, np.zeros(counts.size))
    return seconds


def main() -> None:
    cases = [(policy, prompts) for policy in POLICIES for prompts in PROMPTS]
    without = {case: rollout_seconds(*case, 0.0) for case in cases}
    rows = []
    tokens = []
    for name, acceptance in ACCEPTANCES.items():
        ratios = [rollout_seconds(*case, acceptance) / without[case] for case in cases]
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
        relative = token_seconds(SEQUENCES, acceptance) / token_seconds(SEQUENCES, 0.0)
        tokens.append([name, *(f"{ratio:.2f}" for ratio in relative)])
    print(markdown(["acceptance", *(f"{policy}, {prompts} x {SIZE}" for policy, prompts in cases)], rows))
    print("\nSeconds without drafts:", ", ".join(f"{seconds:.1f}" for seconds in without.values()), "\n")
    print(markdown(["acceptance; sequences", *map(str, SEQUENCES)], tokens))


if __name__ == "__main__":
    main()
