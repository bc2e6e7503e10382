"""The engine's latency: seconds of a decode step by batch size, and of a start, learned while it runs."""

from dataclasses import asdict

from darts_server.policy.latency import LatencyModel, LatencyState
from darts_server.policy.simulation.engines import Machine, StepTime
from darts_server.rollout.learned.documents import Debounce, DocumentStore, Parse, Restores, StoredValues

KIND, KEY = "latency", "engine"
WRITE_DELAY_SECONDS = 2.0
"""A write has some 30 KB, and what a killed process loses is learned again in as many seconds."""

PARSERS: dict[str, Parse] = {KIND: lambda value: LatencyState(**value)}
"""How values are parsed, by kind."""
UNLIMITED = 1 << 20
"""Sequences that an engine without a limit runs at once."""


class Latency:
    """Learn the engine's latency curve and keep it in ``documents``.

    ``capacity``: most sequences that run at once; ``kv_tokens``: most tokens in KV caches; both of all ``engines``, and
    ``None`` if unknown.
    """

    def __init__(
        self, documents: DocumentStore, capacity: int | None = None, kv_tokens: int | None = None, engines: int = 1
    ) -> None:
        self.engines = engines
        self.capacity = capacity
        self.kv_tokens = kv_tokens
        self._states = StoredValues(documents, KIND, PARSERS[KIND])
        self._write_later = Debounce(WRITE_DELAY_SECONDS, self._write)
        self._restores = Restores(documents)
        self._model = LatencyModel(self._states.load(KEY))

    @property
    def start_seconds(self) -> float | None:
        """Seconds that a candidate costs when it starts, besides its decode steps; ``None`` until it is known."""
        return self._learned().start_seconds

    def step_seconds(self, batch: int) -> float | None:
        """Seconds of a decode step while ``batch`` sequences run on all engines; ``None`` until they are known."""
        curve = self._learned().curve
        return None if curve is None else curve.scaled(1 / self.engines).step_seconds(batch)

    def machine(self) -> Machine | None:
        """Describe the engine to the model of a rollout; ``None`` while the curve is unknown."""
        model = self._learned()
        if (curve := model.curve) is None:
            return None
        times = StepTime(curve, per_start=model.start_seconds or 0.0)
        sequences = UNLIMITED if self.capacity is None else max(1, self.capacity // self.engines)
        # Blocks of one token: how large they are is not known.
        blocks = None if self.kv_tokens is None else max(1, self.kv_tokens // self.engines)
        return Machine(times, replicas=self.engines, max_num_seqs=sequences, kv_blocks=blocks, block_size=1)

    def observe(self, batch: int, seconds: float, started: int = 0) -> None:
        """Learn that a step of ``batch`` sequences took ``seconds``, in which so many of them ``started``."""
        self._model.observe(batch, seconds, started)
        self._write_later.request()

    def flush(self) -> None:
        """Write everything that is pending to ``documents``."""
        self._write_later.run_pending()

    def _learned(self) -> LatencyModel:
        """Return the model, from restored state if there is any.

        Steps after the restore are forgotten too if this comes later, which it does within `WRITE_DELAY_SECONDS`.
        """
        if self._restores.noticed():
            self._model = LatencyModel(self._states.load(KEY))
        return self._model

    def _write(self) -> None:
        before = self._model
        if self._learned() is before:
            self._states.save(KEY, asdict(before.state))
