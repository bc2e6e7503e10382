"""Run rounds of examples, restart the server when it must be, and shrink what fails."""

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Protocol

import httpx
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import HypothesisWarning

from darts_server.demo.server import Server
from faults.fuzz.request import Example, commands
from faults.fuzz.routes import operations, valid_requests
from faults.fuzz.sequences import examples
from faults.fuzz.session import ANSWER_SECONDS, MAX_DETAIL, MAX_STALL_SECONDS, Session, Violation, disrupts
from faults.fuzz.watch import HealthWatch, megabytes

EXAMPLES = 100
"""Of a round. A round's seed repeats what is sent, in which order, and what is sent at the same time."""
ROUND_REQUESTS = 500
"""More than a round usually sends."""
TOGETHER = 32
"""Examples at most that are sent at the same time; then the server must become idle, and is checked. The engine takes
about as long for a token of one request as for tokens of a hundred: one after the other they take three times as much
processor time."""
SHRINK_SECONDS = 45.0
"""Of hypothesis, and again for requests that are left out."""
EXIT_SECONDS = 20.0
"""In which a server whose engine is dead exits."""
WARM_UP = 0.5
"""Share of the requests, but at least that many, after which memory must not grow: caches are full then, and the
engine's largest batches have been. Of 56 MB in 75,000 requests, 10 came in the last 41,000."""
MIN_WARM_UP = 2_000
MAX_GROWTH_MB = 50.0
SMOOTHED = 5
"""Samples whose median counts as the memory at a time."""
DEATH, HANG, STALL, UNBALANCED, NOT_SERVED, NO_ANSWER = (
    "death",
    "hang",
    "stall",
    "unbalanced",
    "not served",
    "no answer",
)
FATAL = (DEATH, HANG, NO_ANSWER, UNBALANCED, NOT_SERVED)
"""After these the server is started again, so that the next example has a sound one."""


class Target(Protocol):
    """Where the server under test comes from. ``root``: its --weights-root."""

    root: Path

    @property
    def server(self) -> Server: ...

    def restart(self) -> None:
        """Stop the server, if it still runs, and start another one.

        Raises:
            RuntimeError: it cannot be started again.
        """
        ...


@dataclass(frozen=True)
class Failure:
    """A violation with the smallest example that was found for it. ``seed``: of its round."""

    violation: Violation
    seed: int
    is_reproduced: bool
    commands: Sequence[str]

    def __str__(self) -> str:
        where = f" of {self.violation.route}" if self.violation.route else ""
        again = "" if self.is_reproduced else " (once, not when it was sent again)"
        lines = [f"{self.violation.kind}{where}{again}: {self.violation.detail}"]
        lines.append(f"  the whole round: python -m faults.fuzz --seed {self.seed} --requests {ROUND_REQUESTS}")
        return "\n".join([*lines, *(f"  {command}" for command in self.commands)])


@dataclass
class Tally:
    """What was sent and what happened.

    Attributes:
        answers: requests by method and route, and by status; the status is "left" if the caller left.
        repeated: further violations like those in ``failures``, by kind.
        restarts: servers that were started after one that was dead, hung or unsound; also while a case is shrunk.
        single_stalls: that did not happen again when the same was sent again: the machine may have caused them.
        growth: of the server's memory after the warm-up, in MB; ``None`` if the run was too short.
    """

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    single_stalls: int = 0
    longest_health: float = 0.0
    seconds: float = 0.0
    growth: float | None = None

    @property
    def requests(self) -> int:
        return self.answers.total()

    def count(self, *kinds: str) -> int:
        """Count violations of these kinds."""
        return sum(failure.violation.kind in kinds for failure in self.failures) + sum(
            self.repeated[kind] for kind in kinds
        )

    @property
    def survived(self) -> bool:
        return not self.failures and (self.growth is None or self.growth < MAX_GROWTH_MB)


class _Found(Exception):
    """Ends an example for hypothesis."""


@dataclass(frozen=True)
class _Sent:
    """Examples that were sent at the same time, with the bodies of their requests."""

    examples: Sequence[Example]
    bodies: Sequence[Sequence[bytes]]


class Fuzzer:
    """Sends examples to a target.

    Args:
        changes: whether requests may change the server: its policy, state and weights.
        found: called with each failure.
        sent: called with the number of requests after each example.
    """

    def __init__(
        self,
        target: Target,
        folder: Path,
        changes: bool = True,
        found: Callable[[Failure], None] = lambda _: None,
        sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.tally = Tally()
        self._target, self._folder, self._changes, self._found, self._sent = target, folder, changes, found, sent
        self._known: set[tuple[str, str, str]] = set()
        self._state = b""
        self._samples: list[tuple[int, float]] = []
        self._requests = 0
        self._runner = asyncio.Runner()
        self._server_life = ExitStack()

    def __enter__(self) -> "Fuzzer":
        description = httpx.get(f"{self._target.server.url}/openapi.json", timeout=ANSWER_SECONDS).json()
        self._operations = operations(description)
        self._examples = examples(self._operations, self._changes)
        self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._disconnect()
        self._runner.close()

    def run(self, first_seed: int, requests: int) -> Tally:
        """Send at least this many requests, in rounds with the seeds ``first_seed``, ``first_seed`` + 1, …

        Those that are sent again for a failure come on top: how many these are depends on the time that each takes,
        and the same seed and number must send the same. Ctrl-C ends the run early.
        """
        began, round_seed = time.monotonic(), first_seed
        self._requests = 0
        try:
            while self._requests < requests:
                self._run_round(round_seed, requests)
                round_seed += 1
        except KeyboardInterrupt:
            for task in asyncio.all_tasks(self._runner.get_loop()):
                task.cancel()
        self.tally.seconds = time.monotonic() - began
        self.tally.growth = self._growth(requests)
        return self.tally

    def _run_round(self, round_seed: int, requests: int) -> None:
        drawn: list[Example] = []
        self._for_each_example(round_seed, drawn.append)
        # Apart, so that only requests which others may end are allowed to fail for it.
        for is_disruptive in (False, True):
            alike = [example for example in drawn if disrupts(example) == is_disruptive]
            batches = -(-len(alike) // TOGETHER)
            for number in range(batches):
                if self._requests >= requests:
                    return
                self._attempt(round_seed, drawn, alike[number::batches])

    def _for_each_example(self, round_seed: int, attempt: Callable[[Example], None]) -> None:
        """Call ``attempt`` with the examples of a round, and if it raises ``_Found`` with smaller ones."""

        @seed(round_seed)
        @settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
        )
        @given(self._examples)
        def run(example: Example) -> None:
            attempt(example)

        with suppress(_Found), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Generating overly large repr", HypothesisWarning)  # of a long body
            run()

    def _attempt(self, round_seed: int, drawn: Sequence[Example], batch: Sequence[Example]) -> None:
        """Send examples at the same time, and find the smallest cause of the first new violation."""
        self._requests += sum(map(len, batch))
        violations, sent = self._execute(batch)
        for violation in violations:
            if violation.signature in self._known:
                self.tally.repeated[violation.kind] += 1
                continue
            again = self._repeated(batch, violation)
            if again is not None:
                alone = self._fails_alone(batch, violation)
                sent = (
                    self._fewest(again, violation)
                    if alone is None
                    else self._shrunk(round_seed, drawn, alone, violation)
                )
            elif violation.kind == STALL:
                self.tally.single_stalls += 1
                continue
            self._record(violation, round_seed, again is not None, sent)
            return

    def _repeated(self, batch: Sequence[Example], violation: Violation) -> _Sent | None:
        """Send examples again; return what was sent if the violation happened again."""
        violations, sent = self._execute(batch)
        return sent if any(each.signature == violation.signature for each in violations) else None

    def _fails_alone(self, batch: Sequence[Example], violation: Violation) -> _Sent | None:
        """Find an example of a batch that causes the violation without the others."""
        named = [example for example in batch if any(request.name == violation.route for request in example)]
        sent = (self._repeated([example], violation) for example in named or batch)
        return next((each for each in sent if each is not None), None)

    def _shrunk(self, round_seed: int, drawn: Sequence[Example], failing: _Sent, violation: Violation) -> _Sent:
        """Return the smallest example that was found.

        Hypothesis simplifies an example when it draws it; other examples of the round count as passed.
        """
        deadline = time.monotonic() + SHRINK_SECONDS
        results: dict[Example, _Sent | None] = dict.fromkeys(drawn) | {failing.examples[0]: failing}
        smallest = failing

        def attempt(example: Example) -> None:
            nonlocal smallest
            if example not in results:
                if time.monotonic() > deadline:
                    return
                results[example] = self._repeated([example], violation)
            if (sent := results[example]) is not None:
                smallest = sent
                raise _Found

        self._for_each_example(round_seed, attempt)
        return self._fewest(smallest, violation)

    def _fewest(self, sent: _Sent, violation: Violation) -> _Sent:
        """Leave out examples that the violation does not need, or requests of a single one, as the time allows.

        Hypothesis would do it too, but not first, and a long example takes seconds each time.
        """
        deadline = time.monotonic() + SHRINK_SECONDS
        is_single = len(sent.examples) == 1
        parts = [(request,) for request in sent.examples[0]] if is_single else list(sent.examples)
        alone = [each for each in parts if each[0].name == violation.route] if is_single and len(parts) > 1 else []
        for each in alone:
            if (again := self._repeated([each], violation)) is not None:
                return again
        for place in reversed(range(len(parts))):
            fewer = parts[:place] + parts[place + 1 :]
            if fewer and time.monotonic() < deadline:
                batch = [tuple(chain.from_iterable(fewer))] if is_single else fewer
                if (again := self._repeated(batch, violation)) is not None:
                    parts, sent = fewer, again
        return sent

    def _execute(self, batch: Sequence[Example]) -> tuple[list[Violation], _Sent]:
        """Send examples at the same time, and check the server; start another one if this one is not sound."""
        session, health = self._session, self._health
        violations: list[Violation] = []
        is_sound = True
        try:
            violations += self._runner.run(session.run(batch))
            if not violations:
                violations += self._runner.run(session.check_idle())
                self._samples.append((self.tally.requests, megabytes(self._target.server.process.pid)))
        except httpx.HTTPStatusError as error:
            kind, request = f"status {error.response.status_code}", error.request
            where = f"{request.method} {request.url.path}"
            violations.append(Violation(kind, where, f"after the example: {error.response.text[:MAX_DETAIL]}"))
            is_sound = False
        except httpx.TransportError as error:
            violations.append(Violation(HANG, "", f"after the example: {error!r}"))
        sent = _Sent(batch, [[answer.body for answer in answers] for answers in session.answers])
        for answer in chain.from_iterable(session.answers):
            self.tally.answers[answer.request.name, str(answer.status or answer.error)] += 1
        self._sent(self.tally.requests)
        if (longest := health.longest()) > MAX_STALL_SECONDS:
            violations.append(Violation(STALL, "", f"/health took {longest:.1f} s"))
        self.tally.longest_health = max(self.tally.longest_health, longest)
        if violations and (code := self._exit_code()) is not None:
            violations = [Violation(DEATH, "", f"exit code {code}: {_cause(self._target.server)}")]
        if not is_sound or any(violation.kind in FATAL for violation in violations):
            self.tally.restarts += 1
            self._disconnect()
            self._target.restart()
            self._connect()
        return violations, sent

    def _exit_code(self) -> int | None:
        """Return the exit code of the server; wait for it if the engine is dead."""
        server, is_well = self._target.server, False
        with suppress(httpx.HTTPError):
            is_well = httpx.get(f"{server.url}/health", timeout=EXIT_SECONDS, verify=False).is_success
        deadline = time.monotonic() + (0.0 if is_well else EXIT_SECONDS)
        while (code := server.process.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return code

    def _connect(self) -> None:
        self._session = Session(self._target.server, self._target.root, self._state)
        self._runner.run(self._session.__aenter__())
        self._state = self._session.state
        # What the server loads with the first request of a kind takes seconds, once.
        self._runner.run(self._session.run([tuple(valid_requests(self._operations))]))
        self._health = self._server_life.enter_context(
            HealthWatch(self._target.server.url, self._target.server.process.pid)
        )
        self._samples.clear()

    def _disconnect(self) -> None:
        self._runner.run(self._session.__aexit__())
        self._server_life.close()

    def _record(self, violation: Violation, round_seed: int, is_reproduced: bool, sent: _Sent) -> None:
        folder = self._folder / f"failure-{len(self.tally.failures) + 1}"
        lines: list[str] = []
        for number, (example, bodies) in enumerate(zip(sent.examples, sent.bodies, strict=True)):
            each = commands(example, self._target.server.url, bodies, folder / str(number))
            lines += each if len(sent.examples) == 1 else ["(", *(f"  {command}" for command in each), ") &"]
        self._known.add(violation.signature)
        failure = Failure(violation, round_seed, is_reproduced, lines)
        self.tally.failures.append(failure)
        self._found(failure)

    def _growth(self, requests: int) -> float | None:
        """Return by how much the memory of the last server grew after its warm-up."""
        if not self._samples:
            return None
        first = self._samples[0][0] + max(MIN_WARM_UP, int(WARM_UP * requests))
        warm = [size for count, size in self._samples if count >= first]
        if len(warm) < 2 * SMOOTHED:
            return None
        return median(warm[-SMOOTHED:]) - median(warm[:SMOOTHED])


def _cause(server: Server) -> str:
    """Return the last line of the log that names an error."""
    lines = server.log.read_text(errors="replace").splitlines()
    named = [line for line in lines if " CRITICAL " in line or " ERROR " in line]
    return (named or lines or ["no log"])[-1][:300]
