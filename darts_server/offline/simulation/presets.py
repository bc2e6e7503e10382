"""Presets: workloads fitted to public traces of RL training, each with a machine computed from public figures.

A decode step reads the weights and the KV caches from memory, and computes 2 FLOPs per parameter and sequence. Its time
is the slower of reading the weights and the arithmetic, plus the time to read the KV caches, and an overhead for
launches, scheduling and the all-reduces of tensor parallelism. Training takes 8 FLOPs per parameter and token: 6 for
forward and backward, 2 for the log-probs of the old policy.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from darts_server.estimates.latency import LatencyCurve
from darts_server.offline.simulation.model.engines import BLOCK_SIZE, Machine, StepTime
from darts_server.offline.simulation.workload import FittedWorkload

MEMORY_EFFICIENCY = 0.8
"""Share of the peak bandwidth. A copy on an H200 reaches .9 of it (4.3 of 4.8 TB/s)."""
COMPUTE_EFFICIENCY = 0.6
"""Share of the peak arithmetic. Large matrix products on an H200 reach .8 (790 of 989 TFLOP/s), a decode step less."""
TRAINING_EFFICIENCY = 0.4
"""Share of the peak arithmetic over a whole training step, as large dense models usually reach it."""
KV_SHARE = 0.9
"""Share of the memory that vLLM uses by default."""
STEP_OVERHEAD = 1.5e-3
"""Seconds of a step for scheduling, launches and sampling."""
ALL_REDUCE = 10e-6
"""Seconds of a small all-reduce. Each layer of a model on several GPUs has two."""
PER_SEQUENCE = 10e-6
"""Seconds of a step for each sequence: sampling and output."""
BYTES = 2
"""Size of a parameter or a KV entry in bf16."""
HEAD_SIZE = 128
"""Values of a KV head."""
TRAINING_FLOPS = 8
MAX_NUM_SEQS = 1024
"""vLLM's default on GPUs with much memory."""


class Gpu(NamedTuple):
    """Peak figures of a GPU."""

    bandwidth: float
    """Bytes per second."""
    flops: float
    """FLOPs per second in bf16, without sparsity."""
    memory: float
    """Bytes."""


class Model(NamedTuple):
    """A dense model."""

    parameters: float
    layers: int
    kv_heads: int


# From the vendor's data sheets.
H20 = Gpu(4.0e12, 148e12, 96e9)
H100 = Gpu(3.35e12, 989e12, 80e9)
H200 = Gpu(4.8e12, 989e12, 141e9)
# From the models' public configurations: Qwen2.5, and Qwen3 for 8B.
QWEN_7B = Model(7.6e9, 28, 4)
QWEN_8B = Model(8.2e9, 36, 8)
QWEN_14B = Model(14.8e9, 48, 8)
QWEN_32B = Model(32.8e9, 64, 8)


def build_machine(
    model: Model,
    gpu: Gpu,
    per_replica: int,
    replicas: int,
    between_rollouts: float,
) -> Machine:
    """Build ``replicas`` engines of ``per_replica`` GPUs each, which also train. ``between_rollouts``: seconds."""
    bandwidth = gpu.bandwidth * MEMORY_EFFICIENCY * per_replica
    flops = gpu.flops * COMPUTE_EFFICIENCY * per_replica
    overhead = STEP_OVERHEAD
    if per_replica > 1:
        overhead += 2 * model.layers * ALL_REDUCE
    weight_seconds = model.parameters * BYTES / bandwidth
    sequence_seconds = 2 * model.parameters / flops
    # From so many sequences on, the arithmetic takes longer than reading the weights. A curve needs two points, so the
    # bend is above one sequence.
    bend = max(2.0, weight_seconds / sequence_seconds)
    seconds_at_one = overhead + max(weight_seconds, sequence_seconds) + PER_SEQUENCE
    seconds_at_bend = overhead + max(weight_seconds, bend * sequence_seconds) + bend * PER_SEQUENCE
    curve = LatencyCurve((1.0, bend), (seconds_at_one, seconds_at_bend), sequence_seconds + PER_SEQUENCE)
    # A key and a value for each KV head of each layer.
    kv_bytes_per_token = 2 * model.layers * model.kv_heads * HEAD_SIZE * BYTES
    cache_bytes = gpu.memory * KV_SHARE * per_replica - model.parameters * BYTES
    training_flops = gpu.flops * TRAINING_EFFICIENCY * per_replica * replicas
    return Machine(
        StepTime(curve, per_context_token=kv_bytes_per_token / bandwidth, per_prefill_token=sequence_seconds),
        replicas=replicas,
        max_num_seqs=MAX_NUM_SEQS,
        kv_blocks=int(cache_bytes / kv_bytes_per_token / BLOCK_SIZE),
        training_per_token=TRAINING_FLOPS * model.parameters / training_flops,
        between_rollouts=between_rollouts,
    )


def with_engines(machine: Machine, replicas: int) -> Machine:
    """Engines also train, so more engines train faster."""
    per_token = machine.training_per_token * machine.replicas / replicas
    return replace(machine, replicas=replicas, training_per_token=per_token)


TINY_MACHINE = Machine(
    StepTime(LatencyCurve((1.0, 128.0), (0.002, 0.0095), 6e-5), per_prefill_token=1e-5),
    max_num_seqs=256,
    training_per_token=1.2e-4,
    between_rollouts=0.08,
)
"""The tiny model on two CPU cores: some 13,000 tokens/s with 128 sequences, and .5 s to train on 128 trajectories."""

# --- workloads -------------------------------------------------------------

_MEDIANS = (0.0, 0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98, 1.0)
_RATIOS = (0.0, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.99, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class Preset:
    about: str
    """Source of the lengths and the machine."""
    workload: FittedWorkload
    machine: Machine
    prompts: int = 256
    """Prompts of a batch."""


DAPO = FittedWorkload(
    medians=(_MEDIANS, (190, 250, 310, 400, 470, 555, 660, 830, 1140)),
    ratios=(_RATIOS, (0.002, 0.012, 0.018, 0.065, 0.21, 0.41, 0.69, 1.0, 1.36, 2.05, 2.8, 3.6, 5.8, 7.5, 20.0)),
    max_tokens=10_112,
    prompt_median=155,
    prompt_spread=0.30,
)
DEEPCODER = FittedWorkload(
    medians=(_MEDIANS, (1_030, 1_270, 2_940, 4_600, 11_500, 14_300, 15_700, 16_800, 17_500)),
    ratios=(_RATIOS, (0.43, 0.47, 0.54, 0.65, 0.75, 0.83, 0.92, 1.0, 1.09, 1.2, 1.28, 1.45, 1.8, 2.1, 2.5)),
    max_tokens=16_000,
    prompt_median=430,
    prompt_spread=0.50,
)
SEARCH_R1 = FittedWorkload(
    medians=(_MEDIANS, (63, 88, 108, 125, 149, 198, 253, 331, 406)),
    ratios=(_RATIOS, (0.007, 0.16, 0.23, 0.35, 0.48, 0.64, 0.83, 1.0, 1.24, 1.76, 2.35, 3.4, 5.3, 7.9, 23.0)),
    max_tokens=4_300,
    prompt_median=1_230,
    prompt_spread=0.29,
)
TINY = FittedWorkload(
    medians=((0.0, 0.5, 1.0), (3, 23, 60)),
    ratios=((0.0, 0.1, 0.5, 0.8, 0.9, 0.95, 1.0), (0.12, 0.5, 1.0, 1.5, 3.0, 5.2, 12.0)),
    max_tokens=256,
    prompt_median=22,
    prompt_spread=0.3,
)

PRESETS: dict[str, Preset] = {
    "dapo-32b": Preset(
        "Qwen2.5-32B on DAPO's maths problems (PolyTrace): mean 580 tokens and a long tail; 8 engines of 4 H100",
        DAPO,
        build_machine(QWEN_32B, H100, 4, 8, 10.0),
    ),
    "deepcoder-14b-16k": Preset(
        "DeepCoder 14B with at most 16,000 tokens (PolyTrace): mean 9,800, 15 % truncated; 8 engines of 4 H100",
        DEEPCODER,
        build_machine(QWEN_14B, H100, 4, 8, 6.0),
    ),
    "search-r1-7b": Preset(
        "Search-R1 with Qwen2.5-7B (PolyTrace): a trajectory's length is its generated tokens, the results of its "
        "searches count as prompt, and no trajectory waits for a search; 8 engines of one H100",
        SEARCH_R1,
        build_machine(QWEN_7B, H100, 1, 8, 4.0),
    ),
    "paper-h20-14b": Preset(
        "the DARTS paper's machine for 14B, 64 H20 as 16 engines of 4, with the lengths of dapo-32b",
        DAPO,
        build_machine(QWEN_14B, H20, 4, 16, 6.0),
        512,
    ),
    "paper-h20-32b": Preset(
        "the DARTS paper's machine for 32B, 64 H20 as 8 engines of 8, with the lengths of dapo-32b",
        DAPO,
        build_machine(QWEN_32B, H20, 8, 8, 10.0),
        512,
    ),
    "h200-8b": Preset(
        "Qwen3-8B on one H200, with the lengths of dapo-32b", DAPO, build_machine(QWEN_8B, H200, 1, 1, 2.0), 64
    ),
    "tiny": Preset("the tiny model of examples/tiny_rl on two CPU cores", TINY, TINY_MACHINE, 16),
}
