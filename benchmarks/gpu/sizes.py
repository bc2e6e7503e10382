"""How large everything is: on a GPU, and where there is none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """``prompt``: tokens of a prompt. ``capacity``: sequences that the engine runs at once. ``model_length``: tokens
    that one may have. ``batches``: whose steps are timed, each for ``step_tokens`` tokens. ``divisors``: what lengths
    may be divided by to fit the time. ``load_...``: prompts and tokens of a load whose throughput is compared, in so
    many ``rounds``. ``aborts``: how often an abort is timed. ``updates``: how often at most each path is taken by new
    weights. ``flags``: more of vLLM's.
    """

    prompt: int
    capacity: int
    model_length: int
    batches: tuple[int, ...]
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
    step_tokens=96,
    divisors=(1, 2, 4, 8, 16, 32),
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
    step_tokens=24,
    divisors=(64,),
    load_prompts=4,
    load_tokens=16,
    rounds=2,
    aborts=3,
    updates=2,
    flags=("--dtype", "float32", "--enforce-eager"),
)
