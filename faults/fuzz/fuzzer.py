"""Run rounds of examples, restart the server when it must be, and shrink what fails."""

import asyncio
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
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
from faults.fuzz.session import ANSWER_SECONDS, MAX_DETAIL, MAX_STALL_SECONDS, Session, Violation
from faults.fuzz.watch import HealthWatch, megabytes

EXAMPLES = 100
"""Of a round. A round's seed repeats it."""
ROUND_REQUESTS = 500
"""More than a round usually sends."""
CHECK_EVERY = 25
"""Examples between two checks that wait until the server is idle."""
SHRINK_SECONDS = 45.0
"""Of hypothesis, and again for requests that are left out."""
EXIT_SECONDS = 20.0
"""In which a server whose engine is dead exits."""
WARM_UP = 0.25
"""Share of the requests, but at least that many, after which memory must not grow: caches are full then."""
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
CHECKED = (UNBALANCED, NOT_SERVED)
"""Seen some examples after the one that caused them."""


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


@dataclass
class _Round:
    """The state of a round.

    Attributes:
        check_every: examples between two checks that wait until the server is idle.
        results: of the examples so far, with the bodies that were sent. Hypothesis repeats examples.
        sought: signature of the violation that is being shrunk.
        is_over: whether the remaining examples are skipped.
        unlocated: what a check found that waits for more than one example.
    """

    seed: int
    check_every: int
    results: dict[Example, tuple[Violation | None, list[bytes]]] = field(default_factory=dict)
    sought: tuple[str, str, str] | None = None
    smallest: Example | None = None
    is_reproduced: bool = False
    shrunk_until: float = 0.0
    is_over: bool = False
    unlocated: Violation | None = None


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

        Ctrl-C ends the run early.
        """
        began, round_seed = time.monotonic(), first_seed
        try:
            while self.tally.requests < requests:
                self._run_round(_Round(round_seed, CHECK_EVERY), requests)
                round_seed += 1
        except KeyboardInterrupt:
            for task in asyncio.all_tasks(self._runner.get_loop()):
                task.cancel()
        self.tally.seconds = time.monotonic() - began
        self.tally.growth = self._growth(requests)
        return self.tally

    def _run_round(self, this: _Round, requests: int) -> None:
        self._attempt_all(this, requests)
        if this.unlocated is not None:
            again = _Round(this.seed, 1)
            self._attempt_all(again, requests + self.tally.requests)
            if again.smallest is None and this.unlocated.signature not in self._known:
                self._record(this.unlocated, this.seed, False, [])
            this = again
        if this.smallest is not None:
            violation, bodies = this.results[this.smallest]
            assert violation is not None
            if this.is_reproduced:
                this.smallest, bodies = self._fewest(this.smallest, violation, bodies)
            folder = self._folder / f"failure-{len(self.tally.failures) + 1}"
            sent = commands(this.smallest, self._target.server.url, bodies, folder)
            self._record(violation, this.seed, this.is_reproduced, sent)

    def _attempt_all(self, this: _Round, requests: int) -> None:
        @seed(this.seed)
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
        def attempt(example: Example) -> None:
            if this.sought is None and self.tally.requests >= requests:
                this.is_over = True
            if not this.is_over:
                self._attempt(this, example)

        with suppress(_Found), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Generating overly large repr", HypothesisWarning)  # of a long body
            attempt()

    def _attempt(self, this: _Round, example: Example) -> None:
        """Send the example unless it was sent before, and raise if it fails."""
        if example not in this.results:
            if this.sought is not None and time.monotonic() > this.shrunk_until:
                return
            is_checked = this.sought is not None or len(this.results) % this.check_every == this.check_every - 1
            this.results[example] = self._result(this, example, is_checked)
        violation, _ = this.results[example]
        if violation is not None and not this.is_over:
            this.smallest = example
            raise _Found

    def _result(self, this: _Round, example: Example, is_checked: bool) -> tuple[Violation | None, list[bytes]]:
        violations, bodies = self._execute(example, is_checked)
        if this.sought is not None:
            return next((each for each in violations if each.signature == this.sought), None), bodies
        for violation in violations:
            if violation.signature in self._known:
                self.tally.repeated[violation.kind] += 1
            elif violation.kind in CHECKED and this.check_every > 1:
                this.unlocated, this.is_over = violation, True
            else:
                repeated, _ = self._execute(example, True)
                this.is_reproduced = any(each.signature == violation.signature for each in repeated)
                if violation.kind == STALL and not this.is_reproduced:
                    self.tally.single_stalls += 1
                    continue
                this.sought = violation.signature
                this.shrunk_until = time.monotonic() + (SHRINK_SECONDS if this.is_reproduced else 0.0)
                return violation, bodies
        return None, bodies

    def _fewest(self, example: Example, violation: Violation, bodies: list[bytes]) -> tuple[Example, list[bytes]]:
        """Leave out requests, as many as the time allows, that the violation does not need.

        Hypothesis would do it too, but not first, and a long example takes seconds each time.
        """
        deadline = time.monotonic() + SHRINK_SECONDS
        alone: list[Example] = [(each,) for each in example if each.name == violation.route]
        for fewer in [] if len(example) == 1 else alone:
            again, sent = self._execute(fewer, True)
            if any(each.signature == violation.signature for each in again):
                return fewer, sent
        for place in reversed(range(len(example))):
            fewer = example[:place] + example[place + 1 :]
            if fewer and time.monotonic() < deadline:
                again, sent = self._execute(fewer, True)
                if any(each.signature == violation.signature for each in again):
                    example, bodies = fewer, sent
        return example, bodies

    def _execute(self, example: Example, is_checked: bool) -> tuple[list[Violation], list[bytes]]:
        """Send an example, and check the server; start another one if this one is not sound."""
        session, health = self._session, self._health
        violations: list[Violation] = []
        is_sound = True
        try:
            violations += self._runner.run(session.run(example))
            if is_checked and not violations:
                violations += self._runner.run(session.check_idle())
                self._samples.append((self.tally.requests, megabytes(self._target.server.process.pid)))
        except httpx.HTTPStatusError as error:
            kind, request = f"status {error.response.status_code}", error.request
            where = f"{request.method} {request.url.path}"
            violations.append(Violation(kind, where, f"after the example: {error.response.text[:MAX_DETAIL]}"))
            is_sound = False
        except httpx.TransportError as error:
            violations.append(Violation(HANG, "", f"after the example: {error!r}"))
        for answer in session.answers:
            self.tally.answers[answer.request.name, str(answer.status or answer.error)] += 1
        self._sent(self.tally.requests)
        bodies = [answer.body for answer in session.answers]
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
        return violations, bodies

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
        self._runner.run(self._session.run(tuple(valid_requests(self._operations))))
        self._health = self._server_life.enter_context(HealthWatch(self._target.server.url))
        self._samples.clear()

    def _disconnect(self) -> None:
        self._runner.run(self._session.__aexit__())
        self._server_life.close()

    def _record(self, violation: Violation, round_seed: int, is_reproduced: bool, sent: Sequence[str]) -> None:
        self._known.add(violation.signature)
        failure = Failure(violation, round_seed, is_reproduced, sent)
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
