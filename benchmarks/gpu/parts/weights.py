"""Measure weight updates of an idle engine: seconds by phase, for each transport that works on one card."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from itertools import product
from pathlib import Path
from statistics import median

from anyio.to_thread import run_sync

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import CHECKPOINT, Shape
from benchmarks.gpu.plan import Budget
from benchmarks.gpu.results import Table, Value
from darts_server.exceptions import UpdateUnsupported
from darts_server.vllm.api.weights import VllmModel
from darts_server.weights.port import Rule
from darts_server.weights.staging import Staging
from darts_server.weights.updates import Updates

PHASES = ("transfer", "check", "pause", "load", "resume")
DISK, PUSHED = "from disk", "pushed"
PASSES = {DISK: 1, PUSHED: 2}
"""How often all bytes are written, to a file or to the card; not counting the checkpoint itself."""
BYTES_PER_SECOND = 1.5e9
"""Speed of a pass, until one was measured."""
MARGIN, EXTRA_SECONDS = 1.3, 1.0
SPARE_BYTES = 1e9
"""Disk space that stays free."""
PIECE_BYTES = 1 << 16
"""Largest piece of a body from the network."""
MEASURED = (
    "Medians of updates of an idle engine, from a file in the checkpoint's format with random values. From disk: the "
    "file has just been written, so it is read from the page cache as far as that reaches. Pushed: passed to the API "
    f"process in pieces of {PIECE_BYTES >> 10} kB, as from HTTP; the network's time comes on top. GB/s: of the update."
)


def table() -> Table:
    phases = dict.fromkeys((f"{phase}, s" for phase in (*PHASES, "total")), ".3f")
    return Table("Weight update", {"path": "", "GB": ".3g", "updates": ",d", **phases, "GB/s": ".2f"})


def estimate_seconds(shape: Shape) -> float:
    """Estimate the seconds for the checkpoint and one update by each path."""
    return _estimate(1 + sum(PASSES.values()), shape.weight_bytes / BYTES_PER_SECOND)


async def measure(bench: Bench, budget: Budget, result: Table, folder: Path) -> None:
    """Write a checkpoint into the model's folder, and update the engine by each path for which there is disk space."""
    shape = bench.shape
    paths = possible_paths(shape, shutil.disk_usage(folder).free, result)
    first = _estimate(1 + PASSES[DISK], shape.weight_bytes / BYTES_PER_SECOND)
    if paths and not budget.fits(first):
        result.note(no_time("the update", first, budget))
    elif paths:
        start = time.perf_counter()
        await run_sync(shape.write_checkpoint, folder)
        pass_seconds = time.perf_counter() - start
        bench.shape_nothing()
        try:
            async with asyncio.timeout(budget.remaining):
                await run_updates(
                    bench, budget, result, folder, {path: _estimate(PASSES[path], pass_seconds) for path in paths}
                )
        except UpdateUnsupported as error:
            result.note(f"Left out: {error}.")


def possible_paths(shape: Shape, free: float, result: Table) -> list[str]:
    """Return the paths for which there is disk space; a pushed file lies beside the checkpoint."""
    paths = []
    for path, files in ((DISK, 1), (PUSHED, 2)):
        wanted = files * shape.weight_bytes + SPARE_BYTES
        if wanted <= free:
            paths.append(path)
        else:
            result.note(
                f"Left out for lack of space: {path}, which needs {wanted / 1e9:.1f} GB where --out is; "
                f"{free / 1e9:.1f} GB are free."
            )
    return paths


async def run_updates(bench: Bench, budget: Budget, result: Table, folder: Path, estimates: dict[str, float]) -> None:
    """Update by all paths in turn, so that there is at most one pushed file. ``estimates``: seconds of each path.

    Raises:
        UpdateUnsupported: with these vLLM flags the weights of the engine cannot be replaced.
    """
    # The engine started with dummy weights, without files. Now there is a checkpoint, so the format of new weights can
    # be checked against it.
    bench.llm.vllm_config.load_config.load_format = "auto"
    results, size = dict[str, list[Mapping[str, float]]](), bench.shape.weight_bytes / 1e9
    with Staging(folder) as staging:
        updates = Updates(VllmModel(bench.llm), bench.llm.gate, staging, folder)
        for number, path in product(range(bench.sizes.updates), list(estimates)):
            if not budget.fits(estimates[path]):
                if number == 0:
                    result.note(no_time(path, estimates[path], budget))
                continue
            await bench.drain()
            start = time.perf_counter()
            if path == DISK:
                record = await updates.load(CHECKPOINT, rule=Rule.KEEP)
            else:
                record = await updates.push(lambda _: _pieces(folder / CHECKPOINT), rule=Rule.KEEP)
            total = time.perf_counter() - start
            await bench.request(0, bench.params(1), f"{path}-{number}")  # it serves again
            estimates[path] = _estimate(1, total)
            results.setdefault(path, []).append({**record.seconds, "total": total})
            result.rows.clear()
            for name, seconds in results.items():
                medians = {phase: median(each[phase] for each in seconds) for phase in (*PHASES, "total")}
                phases = {f"{phase}, s": value for phase, value in medians.items()}
                counts: dict[str, Value] = {"path": name, "GB": size, "updates": len(seconds)}
                result.rows.append({**counts, **phases, "GB/s": size / medians["total"]})
            result.note(MEASURED)


def no_time(name: str, seconds: float, budget: Budget) -> str:
    return f"Left out for lack of time: {name}, which needs about {seconds:.0f} s; {budget.remaining:.0f} s remain."


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _estimate(passes: int, seconds: float) -> float:
    return MARGIN * passes * seconds + EXTRA_SECONDS
