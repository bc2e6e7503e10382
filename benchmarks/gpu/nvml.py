"""What NVIDIA's management library says, where it is there."""

import os
import threading
import time
from types import TracebackType
from typing import Any

SAMPLE_SECONDS = 0.1
"""Between two looks at the utilisation; NVML itself averages over a sixth of a second or more."""


def nvml() -> Any:
    """NVML's binding, initialised; ``None`` where there is none. vLLM brings one along."""
    try:
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            from vllm.third_party import pynvml  # type: ignore[no-redef, unused-ignore]
        pynvml.nvmlInit()
    except Exception:  # no binding, no library, no driver: it is an extra column
        return None
    return pynvml


def driver() -> str | None:
    """The version of NVIDIA's driver."""
    library = nvml()
    if library is None:
        return None
    version = library.nvmlSystemGetDriverVersion()
    return version.decode() if isinstance(version, bytes) else str(version)


class Utilisation:
    """Looks ten times a second at how busy the card is, as long as its block lasts.

    The card counts as busy while any kernel runs on it, however small.
    """

    def __init__(self) -> None:
        self._library: Any = None
        self._seen: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

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
        """Mean share of busy time between two moments of ``time.perf_counter()``; ``None`` if nobody looked."""
        shares = [share for at, share in self._seen if began <= at <= ended]
        return sum(shares) / len(shares) if shares else None

    def _look(self) -> None:
        try:
            device = _first_visible(self._library)
            while not self._stop.wait(SAMPLE_SECONDS):
                share = self._library.nvmlDeviceGetUtilizationRates(device).gpu / 100
                self._seen.append((time.perf_counter(), share))
        except self._library.NVMLError:  # some virtual cards do not tell
            return


def _first_visible(library: Any) -> Any:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if first.isdigit():
        return library.nvmlDeviceGetHandleByIndex(int(first))
    return library.nvmlDeviceGetHandleByUUID(first)
