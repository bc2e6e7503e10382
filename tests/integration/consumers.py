"""Consumers of the queue that die with what they have leased, are late, and go on with the next server."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import httpx

from darts_server.demo.server import Server

PATIENCE = 300.0


class Consumers:
    """Threads that take groups of a job with short leases and acknowledge them.

    ``done``: ids of groups, as often as a consumer learned that its lease is acknowledged. ``leases``,
    ``acknowledged``: how many the present server has handed out and acknowledged. ``deaths``: of consumers that had
    groups. ``errors``: answers that must not be.
    """

    def __init__(self, job: str, count: int) -> None:
        self.done: list[str] = []
        self.deaths = 0
        self.errors: list[str] = []
        self.leases = self.acknowledged = 0
        self._job = job
        self._url: str | None = None
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._turns = [threading.Lock() for _ in range(count)]
        self._unanswered: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._consume, args=[number]) for number in range(count)]

    def __enter__(self) -> "Consumers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def connect(self, server: Server) -> None:
        """Go on with another server."""
        self.leases = self.acknowledged = 0
        self._url = server.url

    def disconnect(self) -> None:
        self._url = None

    def wait_done(self, count: int) -> None:
        """Wait until so many groups are done."""
        deadline = time.monotonic() + PATIENCE
        while len(self.done) < count:
            assert time.monotonic() < deadline, f"{len(self.done)} of {count}"
            assert not self.errors
            time.sleep(0.02)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no consumer do anything in the block, nor have acknowledgements that were not answered."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with ExitStack() as turns:
                for turn in self._turns:
                    turns.enter_context(turn)
                if not any(self._unanswered):
                    yield
                    return
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def _consume(self, number: int) -> None:
        rng = Random(number)
        while not self._is_over.wait(0.01):
            with self._turns[number]:
                if (url := self._url) is not None:
                    try:
                        self._take_and_acknowledge(url, self._unanswered[number], rng)
                    except httpx.TransportError:  # the server was killed; the same is sent to the next one
                        self._is_over.wait(0.1)

    def _take_and_acknowledge(self, url: str, unanswered: list[dict[str, Any]], rng: Random) -> None:
        self._acknowledge(url, unanswered)
        params: dict[str, Any] = {"job": self._job, "count": rng.randint(1, 4), "wait": 0.5, "lease_seconds": 1}
        answer = httpx.get(f"{url}/darts/v1/queue/groups", params=params, timeout=240)
        if answer.status_code != 200:
            self.errors.append(answer.text)
            return
        groups = answer.json()["groups"]
        with self._lock:
            self.leases += len(groups)
        if rng.random() < 0.25:
            self.deaths += bool(groups)
            return
        unanswered += groups
        if groups and rng.random() < 0.15:
            self._is_over.wait(1.5)  # its leases expire
        self._acknowledge(url, unanswered)

    def _acknowledge(self, url: str, groups: list[dict[str, Any]]) -> None:
        if not groups:
            return
        leases = [group["lease"] for group in groups]
        answer = httpx.post(f"{url}/darts/v1/queue/ack", json={"leases": leases}, timeout=240)
        if answer.status_code != 200:
            self.errors.append(answer.text)
            return
        outcomes = [lease["outcome"] for lease in answer.json()["leases"]]
        with self._lock:
            self.acknowledged += outcomes.count("acknowledged")
            for group, outcome in zip(groups, outcomes, strict=True):
                if outcome in ("acknowledged", "already"):  # already: before the server was killed
                    self.done.append(group["id"])
                elif outcome != "expired":
                    self.errors.append(f"{group['id']} is {outcome}")
        groups.clear()
