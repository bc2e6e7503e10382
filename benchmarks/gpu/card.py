"""Identify the card, and measure how fast it copies.

``python -m benchmarks.gpu.card`` prints the result as JSON. It is a process of its own, so that its memory on the card
is free again before an engine starts and takes all free memory.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

GPU_COPY_BYTES, CPU_COPY_BYTES = 4 << 30, 128 << 20
"""Far larger than any cache."""
COPIES = 20
PROBE_SECONDS = 180.0
"""Most of it is for importing torch from a cold disk."""


@dataclass(frozen=True)
class Card:
    """``memory``: bytes. ``bandwidth``: bytes read plus bytes written in a second while copying."""

    name: str
    memory: int
    bandwidth: float
    torch: str
    cuda: str | None

    @property
    def is_gpu(self) -> bool:
        return self.cuda is not None


def probe() -> Card:
    """Measure the card in a process of its own.

    Raises:
        RuntimeError: that process failed; the message has the end of its output.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.card"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the card could not be measured within {PROBE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"the card could not be measured:\n{done.stderr[-2000:]}")
    return Card(**json.loads(done.stdout.splitlines()[-1]))


def measure() -> Card:
    import torch

    version: str | None = torch.version.cuda
    if not torch.cuda.is_available():
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        copied = copy_bandwidth(torch.empty(CPU_COPY_BYTES, dtype=torch.uint8), lambda: None)
        return Card(f"no GPU ({platform.machine()})", memory, copied, torch.__version__, None)
    properties = torch.cuda.get_device_properties(0)
    size = min(GPU_COPY_BYTES, torch.cuda.mem_get_info()[0] // 4)
    copied = copy_bandwidth(torch.empty(size, dtype=torch.uint8, device="cuda"), torch.cuda.synchronize)
    return Card(properties.name, properties.total_memory, copied, torch.__version__, version)


def copy_bandwidth(source: Any, wait: Any) -> float:
    """Return bytes read plus bytes written a second, for the fastest of several copies."""
    target = source.clone()
    size, fastest = int(source.numel() * source.element_size()), float("inf")
    for _ in range(COPIES):
        wait()
        start = time.perf_counter()
        target.copy_(source)
        wait()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * size / fastest


if __name__ == "__main__":
    print(json.dumps(asdict(measure())))
