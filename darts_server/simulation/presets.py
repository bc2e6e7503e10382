"""Presets: workloads fitted to public traces of RL training, each with a machine computed from public figures."""

from dataclasses import dataclass, replace

from darts_server.policy.simulation.machine import Machine
from darts_server.simulation import hardware
from darts_server.simulation.workload import FittedWorkload, Quantiles

_MEDIANS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0)
_RATIOS = (0.0, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class Preset:
    """``about``: where the lengths and the machine come from. ``prompts``: of a batch."""

    about: str
    workload: FittedWorkload
    machine: Machine
    prompts: int = 256


DAPO = FittedWorkload(
    medians=Quantiles(_MEDIANS, (190, 250, 310, 400, 470, 555, 660, 830, 1140)),
    ratios=Quantiles(
        _RATIOS, (0.002, 0.012, 0.018, 0.065, 0.21, 0.41, 0.69, 1.0, 1.36, 2.05, 2.8, 3.6, 5.8, 7.5, 20.0)
    ),
    max_tokens=10_112,
    prompt_median=155,
    prompt_spread=0.30,
)
DEEPCODER = FittedWorkload(
    medians=Quantiles(_MEDIANS, (1_030, 1_270, 2_940, 4_600, 11_500, 14_300, 15_700, 16_800, 17_500)),
    ratios=Quantiles(_RATIOS, (0.43, 0.47, 0.54, 0.65, 0.75, 0.83, 0.92, 1.0, 1.09, 1.2, 1.28, 1.45, 1.8, 2.1, 2.5)),
    max_tokens=16_000,
    prompt_median=430,
    prompt_spread=0.50,
)
SEARCH_R1 = FittedWorkload(
    medians=Quantiles(_MEDIANS, (63, 88, 108, 125, 149, 198, 253, 331, 406)),
    ratios=Quantiles(_RATIOS, (0.007, 0.16, 0.23, 0.35, 0.48, 0.64, 0.83, 1.0, 1.24, 1.76, 2.35, 3.4, 5.3, 7.9, 23.0)),
    max_tokens=4_300,
    prompt_median=1_230,
    prompt_spread=0.29,
)
TINY = FittedWorkload(
    medians=Quantiles((0.0, 0.5, 1.0), (3, 23, 60)),
    ratios=Quantiles((0.0, 0.1, 0.5, 0.8, 0.9, 0.95, 1.0), (0.12, 0.5, 1.0, 1.5, 3.0, 5.2, 12.0)),
    max_tokens=256,
    prompt_median=22,
    prompt_spread=0.3,
)

PRESETS: dict[str, Preset] = {
    "dapo-32b": Preset(
        "Qwen2.5-32B on DAPO's maths problems (PolyTrace): mean 580 tokens and a long tail; 8 engines of 4 H100",
        DAPO,
        hardware.machine(hardware.QWEN_32B, hardware.H100, 4, 8, 10.0),
    ),
    "deepcoder-14b-16k": Preset(
        "DeepCoder 14B with at most 16,000 tokens (PolyTrace): mean 9,800, 15 % truncated; 8 engines of 4 H100",
        DEEPCODER,
        hardware.machine(hardware.QWEN_14B, hardware.H100, 4, 8, 6.0),
    ),
    "search-r1-7b": Preset(
        "Search-R1 with Qwen2.5-7B (PolyTrace): a trajectory's generated tokens are its length, what its searches add "
        "counts as prompt, and it never waits for a search; 8 engines of an H100",
        SEARCH_R1,
        hardware.machine(hardware.QWEN_7B, hardware.H100, 1, 8, 4.0),
    ),
    "paper-h20-14b": Preset(
        "the DARTS paper's machine for 14B, 64 H20 as 16 engines of 4, with the lengths of dapo-32b",
        DAPO,
        hardware.machine(hardware.QWEN_14B, hardware.H20, 4, 16, 6.0),
        prompts=512,
    ),
    "paper-h20-32b": Preset(
        "the DARTS paper's machine for 32B, 64 H20 as 8 engines of 8, with the lengths of dapo-32b",
        DAPO,
        hardware.machine(hardware.QWEN_32B, hardware.H20, 8, 8, 10.0),
        prompts=512,
    ),
    "h200-8b": Preset(
        "Qwen3-8B on one H200, with the lengths of dapo-32b",
        DAPO,
        replace(hardware.machine(hardware.QWEN_8B, hardware.H200, 1, 1, 2.0), max_num_seqs=1024),
        prompts=64,
    ),
    "tiny": Preset("the tiny model of examples/tiny_rl on two CPU cores", TINY, hardware.TINY, prompts=16),
}


def with_tail(workload: FittedWorkload, weight: float) -> FittedWorkload:
    """Return the workload with ratios above 1 raised to the power ``weight``: 1 changes nothing, 0 has no tail."""
    values = tuple(ratio**weight if ratio > 1 else ratio for ratio in workload.ratios.values)
    return replace(workload, ratios=replace(workload.ratios, values=values))
