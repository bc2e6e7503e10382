"""Sizes of the measurements, for a GPU and for a dry run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    Attributes:
        prompt: tokens of a prompt.
        capacity: sequences that the engine runs at once.
        model_length: the maximum tokens of a sequence.
        batches: batch sizes to time, each for ``step_tokens`` tokens.
        contexts: batch sizes to time with a longer prompt, of so many tokens.
        divisors: what lengths may be divided by to fit the time.
        load_prompts, load_tokens: of the load whose throughput is compared, in ``rounds`` rounds.
        aborts: aborts to time.
        updates: the most weight updates by each path.
        flags: more vLLM flags.
    """

    prompt: int
    capacity: int
    model_length: int
    batches: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    step_tokens: int
    divisors: tuple[int, ...]
    load_prompts: int
    load_tokens: int
    rounds: int
    aborts: int
    updates: int
    flags: tuple[str, ...]


GPU = Sizes(
    prompt=200,
    capacity=2048,
    model_length=8448,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    contexts=((64, 2048), (256, 1024)),
    step_tokens=96,
    divisors=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    load_prompts=64,
    load_tokens=64,
    rounds=3,
    aborts=10,
    updates=3,
    flags=("--dtype", "bfloat16"),
)
DRY = Sizes(
    prompt=24,
    capacity=128,
    model_length=1024,
    batches=(1, 2, 4, 8, 16, 32, 64),
    contexts=((4, 64),),
    step_tokens=24,
    divisors=(64,),
    load_prompts=4,
    load_tokens=16,
    rounds=2,
    aborts=3,
    updates=2,
    flags=("--dtype", "float32", "--enforce-eager"),
)
