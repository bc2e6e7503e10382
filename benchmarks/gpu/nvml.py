"""Query NVIDIA's management library, if there is one."""

import os
import threading
import time
from types import TracebackType
from typing import Any

SAMPLE_SECONDS = 0.1
"""NVML itself averages the utilisation over a sixth of a second or more."""


def nvml() -> Any:
    """Return NVML's binding, initialised; ``None`` without one. vLLM includes one."""
    try:
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]  # optional
        except ImportError:
            from vllm.third_party import pynvml  # type: ignore[no-redef, unused-ignore]  # the same library
        pynvml.nvmlInit()
    except Exception:  # no binding, no library or no driver: the report leaves its column out
        return None
    return pynvml


def driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    library = nvml()
    if library is None:
        return None
    version = library.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


class Utilisation:
    """Sample ten times a second whether the card is busy, while the block runs.

    The card counts as busy while any kernel runs on it, however small.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Utilisation":
        self._library = nvml()
        if self._library is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def mean(self, began: float, ended: float) -> float | None:
        """Return the share of busy time between two times of ``time.perf_counter()``; ``None`` without samples."""
        shares = [share for at, share in self._samples if began <= at <= ended]
        return sum(shares) / len(shares) if shares else None

    def _sample(self) -> None:
        try:
            device = _first_visible(self._library)
            while not self._stop.wait(SAMPLE_SECONDS):
                share = self._library.nvmlDeviceGetUtilizationRates(device).gpu / 100
                self._samples.append((time.perf_counter(), share))
        except self._library.NVMLError:  # some virtual cards do not support it
            return


def _first_visible(library: Any) -> Any:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if first.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(first))
    return library.nvmlDeviceGetHandleByUUID(first)
