"""The server that a trainer samples from, as the integrations reach it."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from .. import _calls
from .._connection import Connection
from .._knowledge import WeightsRecord
from .._retries import Patience
from .._sync import Client

UPDATE_SECONDS = 3600.0
"""For new weights: the server ends its own waits earlier (for running groups 600 s, for each other phase 300 s), and
says why."""
ASIDE_SECONDS = 10.0
"""For what training does not need."""


@dataclass(frozen=True, slots=True)
class Link:
    """A server. Connections are made for each call: there are few calls in a step, and none is left to be closed."""

    url: str
    api_key: str | None = None

    def aside(self) -> Client:
        """For what training does not need: asked once and not waited for long."""
        return Client(self.url, api_key=self.api_key, timeout=ASIDE_SECONDS, connect_timeout=ASIDE_SECONDS, retries=0)

    def weights(self) -> WeightsRecord:
        """Which weights are served."""
        with self.aside() as client:
            return client.weights.get()

    def push(self, pieces: Iterable[bytes], size: int) -> WeightsRecord:
        """Send new weights as they come. They cannot come twice, so this is tried once."""
        with closing(self._connection(UPDATE_SECONDS)) as connection:
            return connection.answer(_calls.push_weights(pieces, size, None, None, False))

    def metrics(self) -> str:
        """The server's metrics, in Prometheus' text format."""
        with closing(self._connection(ASIDE_SECONDS)) as connection:
            return connection.send("GET", "/metrics").text

    def _connection(self, seconds: float) -> Connection:
        return Connection(self.url, self.api_key, Patience(timeout=seconds, connect_timeout=ASIDE_SECONDS, retries=0))
