"""How fast the engine is: its step times by batch size, learned while it runs."""

from dataclasses import asdict

from darts_server.policy.latency.curve import LatencyCurve
from darts_server.policy.latency.model import LatencyModel, LatencyState
from darts_server.rollout.debounce import Debounce
from darts_server.rollout.learned.documents import DocumentStore, StoredValues

KEY = "engine"
KEEP_SECONDS = 2.0
"""Between two writes of what was learned: some 30 KB, and learned anew within as many seconds."""


class Latency:
    """The engine's latency curve, kept in ``documents``.

    ``capacity``: most sequences that the engine runs at once, ``None`` if unknown.
    """

    def __init__(self, documents: DocumentStore, capacity: int | None = None) -> None:
        self.capacity = capacity
        self._notes = StoredValues(documents, "latency", lambda value: LatencyState(**value))
        self._keep = Debounce(KEEP_SECONDS, self._write)
        self._model = LatencyModel(self._notes.load(KEY))

    @property
    def curve(self) -> LatencyCurve | None:
        """Seconds of a decode step by batch size; ``None`` before enough steps were seen."""
        return self._model.curve

    def step_seconds(self, batch: int) -> float | None:
        """Seconds of a decode step of ``batch`` sequences; ``None`` before enough steps were seen."""
        return None if self.curve is None else self.curve.step_seconds(batch)

    def observe(self, batch: int, seconds: float) -> None:
        """A decode step of ``batch`` sequences took so long."""
        self._model.observe(batch, seconds)
        self._keep.request()

    def flush(self) -> None:
        """Hand what is pending to ``documents``."""
        self._keep.run_pending()

    def _write(self) -> None:
        self._notes.save(KEY, asdict(self._model.state))
