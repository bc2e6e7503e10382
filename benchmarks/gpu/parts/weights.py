"""New weights: seconds by phase, for each path that works on one card, while the engine has nothing else to do."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from anyio.to_thread import run_sync

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.checkpoint import FILE, write
from benchmarks.gpu.models import Shape
from benchmarks.gpu.tables import Table, Value
from darts_server.exceptions import UpdateUnsupported
from darts_server.types import UpdateRecord
from darts_server.vllm.weights import VllmModel
from darts_server.weights.coordinator import Rule
from darts_server.weights.staging import Staging
from darts_server.weights.updates import UpdateOptions, Updates

TITLE = "Weight update"
PHASES = ("transfer", "check", "pause", "load", "resume")
DISK, PUSHED = "from disk", "pushed"
PASSES = {DISK: 1, PUSHED: 2}
"""How often all bytes are written, to a file or to the card. The checkpoint has to be written before."""
BYTES_A_SECOND = 1.5e9
"""Of a pass, until one was measured."""
MARGIN, EXTRA_SECONDS = 1.3, 1.0
SPARE_BYTES = 1e9
"""Of the disk, left free."""
PIECE = 1 << 16
"""Bytes in which a body comes from the network at most."""
MEASURED = (
    "Medians of updates of an engine that has nothing else to do, from a file in the checkpoint's format with random "
    "values. From disk: the file was written just before, so it is read from memory as far as that has room. Pushed: "
    f"given to the API process in pieces of {PIECE >> 10} kB, as they come over HTTP; a network's time comes on top. "
    "GB/s are those of the whole update."
)
OPTIONS = UpdateOptions(rule=Rule.KEEP)

Seconds = dict[str, list[Mapping[str, float]]]
"""Of each update by phase, by path."""


def table() -> Table:
    phases = dict.fromkeys((f"{phase}, s" for phase in (*PHASES, "in all")), ".3f")
    return Table(TITLE, {"path": "", "GB": ".3g", "updates": ",d", **phases, "GB/s": ".2f"})


def needs(shape: Shape) -> float:
    """Seconds for the checkpoint and one update by each path, about."""
    return _about(1 + sum(PASSES.values()), shape.weight_bytes / BYTES_A_SECOND)


async def measure(bench: Bench, budget: Budget, result: Table, folder: Path) -> None:
    """Write a checkpoint into the model's folder, and give it to the engine by each path for which there is room."""
    shape = bench.shape
    paths = possible(shape, shutil.disk_usage(folder).free, result)
    first = _about(1 + PASSES[DISK], shape.weight_bytes / BYTES_A_SECOND)
    if paths and not budget.fits(first):
        result.note(too_little_time("the update", first, budget))
    elif paths:
        began = time.perf_counter()
        await run_sync(write, shape, folder / FILE)
        a_pass = time.perf_counter() - began
        bench.shape_nothing()
        try:
            async with asyncio.timeout(budget.left):
                await updated(bench, budget, result, folder, {path: _about(PASSES[path], a_pass) for path in paths})
        except UpdateUnsupported as error:
            result.note(f"Left out: {error}.")


def possible(shape: Shape, free: float, result: Table) -> list[str]:
    """The paths for which the disk has room; a pushed file lies beside the checkpoint."""
    paths = []
    for path, files in ((DISK, 1), (PUSHED, 2)):
        wanted = files * shape.weight_bytes + SPARE_BYTES
        if wanted <= free:
            paths.append(path)
        else:
            result.note(
                f"Left out for want of room: {path}, which needs {wanted / 1e9:.1f} GB where --out is; "
                f"{free / 1e9:.1f} GB are free."
            )
    return paths


async def updated(bench: Bench, budget: Budget, result: Table, folder: Path, about: dict[str, float]) -> None:
    """Updates by all paths in turn, so that one pushed file at most is there. ``about``: seconds that each may take.

    Raises:
        UpdateUnsupported: vLLM's flags are such that the weights of this engine cannot be replaced.
    """
    # The engine began with random values, of which there are no files. Those that there are now take their place, so
    # what the model's weights must be is known.
    bench.llm.vllm_config.load_config.load_format = "auto"
    seen: Seconds = {}
    with Staging(folder) as staging:
        updates = Updates(VllmModel(bench.llm), bench.llm.gate, staging, folder)
        ways: dict[str, Callable[[], Awaitable[UpdateRecord]]] = {
            DISK: lambda: updates.load(FILE, OPTIONS),
            PUSHED: lambda: updates.push(lambda _: _pieces(folder / FILE), OPTIONS),
        }
        for number in range(bench.sizes.updates):
            for path in about:
                if budget.fits(about[path]):
                    seconds = await timed(bench, ways[path], f"{path}-{number}")
                    about[path] = _about(1, seconds["in all"])
                    seen.setdefault(path, []).append(seconds)
                    result.rows[:] = [row(path, bench.shape.weight_bytes, each) for path, each in seen.items()]
                    result.note(MEASURED)
                elif number == 0:
                    result.note(too_little_time(path, about[path], budget))


async def timed(bench: Bench, way: Callable[[], Awaitable[UpdateRecord]], name: str) -> dict[str, float]:
    """Seconds of one update by phase, after which the engine serves again."""
    await bench.quiet()
    began = time.perf_counter()
    record = await way()
    took = time.perf_counter() - began
    await bench.ask(0, bench.params(1), name)
    return {**record.seconds, "in all": took}


def too_little_time(what: str, seconds: float, budget: Budget) -> str:
    return f"Left out for want of time: {what}, which needs about {seconds:.0f} s; {budget.left:.0f} s are left."


def row(path: str, size: int, seconds: Sequence[Mapping[str, float]]) -> dict[str, Value]:
    """Medians by phase."""
    typical = {phase: median(each[phase] for each in seconds) for phase in (*PHASES, "in all")}
    return {
        "path": path,
        "GB": size / 1e9,
        "updates": len(seconds),
        **{f"{phase}, s": value for phase, value in typical.items()},
        "GB/s": size / 1e9 / typical["in all"],
    }


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


def _about(passes: int, seconds: float) -> float:
    return MARGIN * passes * seconds + EXTRA_SECONDS
