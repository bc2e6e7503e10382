"""Machines of the presets, computed from public figures of GPUs and models.

A decode step reads the weights and the KV caches from memory and computes 2 FLOPs per parameter and sequence. It takes
as long as the slower of the weights' reads and the arithmetic, and on top of that the reads of KV caches and an
overhead for launches, scheduling and the all-reduces of tensor parallelism. Training takes 8 FLOPs per parameter and
token: 6 for forward and backward, 2 for the log-probs of the old policy.
"""

from dataclasses import dataclass, replace

from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.simulation.machine import BLOCK_SIZE, Machine, StepTime

MEMORY_EFFICIENCY = 0.8
"""Of the peak bandwidth: a copy on an H200 reaches 0.9 of it (4.3 of 4.8 TB/s)."""
COMPUTE_EFFICIENCY = 0.6
"""Of the peak: large matrix products on an H200 reach 0.8 of it (790 of 989 TFLOP/s), those of a decode step less."""
TRAINING_EFFICIENCY = 0.4
"""Of the peak, over a whole training step: what large dense models usually reach."""
KV_SHARE = 0.9
"""Of the memory that vLLM uses by default."""
STEP_OVERHEAD = 1.5e-3
"""Seconds of a step for scheduling, launches and sampling."""
ALL_REDUCE = 10e-6
"""Seconds of a small all-reduce, of which each layer has two, where a model is split over several GPUs."""
PER_SEQUENCE = 10e-6
"""Seconds of a step for each sequence: sampling and output."""
BYTES = 2
"""Of a parameter or a KV entry in bf16."""
TRAINING_FLOPS = 8
MAX_NUM_SEQS = 1024
"""vLLM's default on GPUs with much memory."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``bandwidth`` of the memory in bytes/s, ``flops`` in bf16 without sparsity, ``memory`` in bytes. Peaks."""

    bandwidth: float
    flops: float
    memory: float


@dataclass(frozen=True, slots=True)
class Model:
    """A dense model: number of ``parameters`` and ``layers``, and its KV heads."""

    parameters: float
    layers: int
    kv_heads: int
    head_size: int = 128

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES


H20 = Gpu(4.0e12, 148e12, 96e9)
H100 = Gpu(3.35e12, 989e12, 80e9)
H200 = Gpu(4.8e12, 989e12, 141e9)
"""From the vendor's data sheets."""

QWEN_7B = Model(7.6e9, 28, 4)
QWEN_8B = Model(8.2e9, 36, 8)
QWEN_14B = Model(14.8e9, 48, 8)
QWEN_32B = Model(32.8e9, 64, 8)
"""From the models' public configurations (Qwen2.5 and, with 8B, Qwen3)."""


def machine(model: Model, gpu: Gpu, per_replica: int, replicas: int, between_rollouts: float) -> Machine:
    """Build the machine of ``replicas`` engines of ``per_replica`` GPUs each, which also train."""
    bandwidth, flops = gpu.bandwidth * MEMORY_EFFICIENCY * per_replica, gpu.flops * COMPUTE_EFFICIENCY * per_replica
    overhead = STEP_OVERHEAD + (2 * model.layers * ALL_REDUCE if per_replica > 1 else 0.0)
    reading, computing = model.parameters * BYTES / bandwidth, 2 * model.parameters / flops
    bend = max(2.0, reading / computing)  # sequences from which on the arithmetic takes longer than the reads
    first = overhead + max(reading, computing) + PER_SEQUENCE
    curve = LatencyCurve(
        (1.0, bend),
        (first, overhead + max(reading, bend * computing) + bend * PER_SEQUENCE),
        computing + PER_SEQUENCE,
    )
    free = gpu.memory * KV_SHARE * per_replica - model.parameters * BYTES
    return Machine(
        StepTime(curve, per_context_token=model.kv_bytes / bandwidth, per_prefill_token=computing),
        replicas=replicas,
        max_num_seqs=MAX_NUM_SEQS,
        kv_blocks=int(free / model.kv_bytes / BLOCK_SIZE),
        training_per_token=TRAINING_FLOPS
        * model.parameters
        / (gpu.flops * TRAINING_EFFICIENCY * per_replica * replicas),
        between_rollouts=between_rollouts,
    )


def with_engines(machine: Machine, replicas: int) -> Machine:
    """Return the machine with other engines. They also train, so more of them train faster."""
    per_token = machine.training_per_token * machine.replicas / replicas
    return replace(machine, replicas=replicas, training_per_token=per_token)


TINY = Machine(
    StepTime(LatencyCurve((1.0, 128.0), (0.002, 0.0095), 6e-5), per_prefill_token=1e-5),
    max_num_seqs=256,
    training_per_token=1.2e-4,
    between_rollouts=0.08,
)
"""The tiny model on two CPU cores: some 13,000 tokens/s with 128 sequences, and 0.5 s to train on 128 trajectories."""
