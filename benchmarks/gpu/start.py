"""Start the engine of the benchmark."""

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.gpu.bench import Bench
from darts_server.vllm import launch, server


@asynccontextmanager
async def start_engine(bench: Bench, folder: Path, flags: Sequence[str]) -> AsyncIterator[Bench]:
    """Start the engine of ``bench``, on a model with dummy weights that is written into ``folder``."""
    sizes = bench.sizes
    args = server.parse(
        [
            *(str(bench.shape.write(folder)), "--served-model-name", bench.shape.name, "--load-format", "dummy"),
            *("--max-model-len", str(sizes.model_length), "--max-num-seqs", str(sizes.capacity)),
            *sizes.flags,
            *flags,
        ]
    )
    try:
        async with launch.start_engine(args) as running:
            bench.attach(running)
            # As vLLM's server does before it serves: otherwise a garbage collection now and then walks through
            # everything imported, which takes some tenths of a second.
            gc.collect()
            gc.freeze()
            yield bench
    finally:
        bench.close()
